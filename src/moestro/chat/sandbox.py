"""The sandbox that chat templates run in. The only module that imports jinja2.

The conventions are those of Hugging Face templates: a sandboxed environment, trimmed blocks, loop
controls, `tojson` without HTML escapes, `raise_exception`, `strftime_now`, `{% generation %}`.

A template is a program that came with a checkpoint, and a server runs it between other requests.
So its steps and its output are counted: one that never ends is an error, not a hang.
"""

import datetime
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.visitor

MAX_STEPS = 10_000_000
"""Turns of loops and calls in one rendering: seconds of work. A conversation takes thousands."""
MAX_CHARS = 64 * 1024 * 1024
"""Of one rendering: as many as the largest request body has bytes."""

_STEPS = "moestro steps"  # with a space, so that no template can name it
_METERED = "moestro_metered"
_FAULTS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
)
"""What a wrong template or a wrong conversation raises, at compilation or in a rendering."""


class TemplateFaultError(Exception):
    """The template is wrong, or does not take this conversation; the message says why."""


class SandboxedTemplate:
    """A compiled template. Raises TemplateFaultError when `source` is none."""

    def __init__(self, source: str) -> None:
        environment = _make_environment()
        try:
            tree = _MeterLoops().visit(environment.parse(source))
            code = environment.compile(tree)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateFaultError(f"{error.message} (line {error.lineno})") from error
        except _FAULTS as error:
            raise TemplateFaultError(_reason(error)) from error
        self._template = jinja2.Template.from_code(environment, code, environment.globals)

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text. Raises TemplateFaultError, also when MAX_STEPS or MAX_CHARS are exceeded."""
        parts: list[str] = []
        num_chars = 0
        try:
            for part in self._template.generate({**variables, _STEPS: _Steps()}):
                num_chars += len(part)
                if num_chars > MAX_CHARS:
                    raise TemplateFaultError(f"it writes more than {MAX_CHARS:,} characters")
                parts.append(part)
        except _FAULTS as error:
            raise TemplateFaultError(_reason(error)) from error
        return "".join(parts)


class _Steps:
    """Steps that a rendering has left."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = MAX_STEPS

    def take(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise jinja2.TemplateRuntimeError(
                f"it takes more than {MAX_STEPS:,} steps; do its loops end?"
            )


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Counts calls; _MeterLoops makes loops count too."""

    def call(
        __self,  # noqa: N805 -- named so that keyword arguments can't clash with them
        __context: jinja2.runtime.Context,
        __obj: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        __context[_STEPS].take()
        return super().call(__context, __obj, *args, **kwargs)


class _MeterLoops(jinja2.visitor.NodeTransformer):
    """Sends what every loop runs over through the metered filter."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:  # noqa: N802
        node.iter = jinja2.nodes.Filter(
            node.iter,
            _METERED,
            [],
            [],
            None,
            None,
            lineno=node.lineno,
            environment=node.environment,
        )
        return self.generic_visit(node)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks what a trainer learns; here it is text."""

    tags = {"generation"}  # noqa: RUF012 -- jinja2's own interface

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _make_environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    del environment.globals["lipsum"]  # text of any length in one call
    environment.filters[_METERED] = _metered
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


@jinja2.pass_context
def _metered(context: jinja2.runtime.Context, items: Iterable[Any]) -> Iterator[Any]:
    steps = context[_STEPS]
    for item in items:
        steps.take()
        yield item


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(spec: str) -> str:
    return datetime.datetime.now().strftime(spec)


def _reason(error: BaseException) -> str:
    """Some of these have no message of their own."""
    return str(error) or type(error).__name__
