"""The support table and the generated page."""

import moestro.backends.cpu  # noqa: F401 -- registers the bodies
from moestro import ops
from moestro.ops.table import support_page, support_table


def test_table_has_a_line_for_every_body() -> None:
    lines = support_table().splitlines()[2:]
    assert len(lines) == sum(len(served) for op in ops.all_ops() for served in op.bodies.values())
    first = ops.rms_norm.bodies["cpu"][0]
    conditional = "no" if first.when is None else "yes"
    invariant = "yes" if first.invariant else "no"
    assert f"| rms_norm | cpu | {first.name} | {conditional} | {invariant} |" in lines


def test_page_holds_every_contract() -> None:
    page = support_page()
    for op in ops.all_ops():
        assert f"### {op.name}\n" in page
        assert (op.__doc__ or "").strip().splitlines()[0] in page
    assert "moestro.ops" not in page
    assert "Changed in place: `pages`." in page
