"""The Plan travels as JSON and comes back equal."""

import json

from hypothesis import given
from hypothesis import strategies as st

from moestro.core.plan import Plan

SIZES = st.integers(0, 2**62)
PLANS = st.builds(
    Plan,
    **dict.fromkeys(("model", "device", "dtype", "kv_cache_dtype"), st.text(max_size=20)),
    **{
        name: SIZES
        for name, field in Plan.__dataclass_fields__.items()
        if field.type is int or field.type == "int"
    },
    notes=st.lists(st.text(max_size=20), max_size=3).map(tuple),
)


@given(PLANS)
def test_round_trip_is_exact(plan: Plan) -> None:
    assert Plan.from_json(plan.to_json()) == plan
    values = json.loads(plan.to_json())
    assert values["total_bytes"] == plan.weight_bytes + plan.kv_cache_bytes + plan.buffer_bytes
