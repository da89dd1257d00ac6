"""A template can neither reach outside, nor hold up the process, nor crash it."""

import pytest

from moestro.chat import sandbox
from moestro.chat.sandbox import SandboxedTemplate, TemplateFaultError


def render(source: str, **variables: object) -> str:
    return SandboxedTemplate(source).render(variables)


@pytest.mark.parametrize(
    "source",
    [
        "{% for",
        "{% if true %}",
        "{% nonsense %}",
        "{% break %}",
        "{{ " + "(" * 5000 + ")" * 5000 + " }}",
        "{% if true %}" * 3000 + "{% endif %}" * 3000,
        "{{ x | nonsense }}",
        "{{ 2 ** 20000 }}",
    ],
)
def test_what_is_no_template_is_refused(source: str) -> None:
    with pytest.raises(TemplateFaultError):
        SandboxedTemplate(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ x.append(1) }}",
        "{% include '/etc/passwd' %}",
        "{% import '/etc/passwd' as x %}",
        "{{ range(10 ** 9) | list }}",
        "{{ lipsum(10 ** 9) }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ strftime_now(5) }}",
    ],
)
def test_what_leads_outside_is_refused(source: str) -> None:
    with pytest.raises(TemplateFaultError):
        render(source, x=[1])


@pytest.mark.parametrize(
    "source",
    ["{{ strftime_now.__globals__ }}", "{{ x | attr('__class__') }}", "{{ self.__init__ }}"],
)
def test_inner_attributes_are_empty(source: str) -> None:
    assert render(source, x=[1]) == ""


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) ~ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for i in x recursive %}{{ loop(i) }}{{ loop(i) }}{% endfor %}",
    ],
)
def test_loops_without_end_are_ended(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_STEPS", 1000)
    nested: list[object] = []
    for _ in range(20):
        nested = [nested]
    with pytest.raises(TemplateFaultError, match="more than 1,000 steps"):
        render(source, x=nested)


def test_text_without_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_CHARS", 1000)
    assert len(render("{{ x * 1000 }}", x="a")) == 1000
    with pytest.raises(TemplateFaultError, match="more than 1,000 characters"):
        render("{% for i in range(99) %}{{ x * 100 }}{% endfor %}", x="a")


def test_a_lack_of_memory_is_a_fault_of_the_template() -> None:
    with pytest.raises(TemplateFaultError):
        render("{{ x * 10 ** 17 }}", x="a")


def test_counting_changes_no_loop() -> None:
    source = (
        "{% for x in items if x != 2 %}{{ loop.index }}/{{ loop.length }}{{ x }}"
        "{{ ',' if not loop.last }}{% else %}none{% endfor %}"
    )
    assert render(source, items=[1, 2, 3]) == "1/21,2/23"
    assert render(source, items=[]) == "none"
    tree = "{% for x in t recursive %}({{ loop.depth }}{{ loop(x) }}){% endfor %}"
    assert render(tree, t=[[[], []], []]) == "(1(2)(2))(1)"
    assert render("{% for k, v in d.items() %}{{ k }}{{ v }}{% endfor %}", d={"a": 1}) == "a1"
    assert render("{% for x in nothing %}{{ x }}{% endfor %}") == ""


def test_no_template_can_reach_the_count() -> None:
    assert "moestro" not in render("{{ self._TemplateReference__context }}")
