"""The Plan as it is printed: every field, exact, and the total."""

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
def test_printed_as_json_it_loses_nothing(plan: Plan) -> None:
    values = json.loads(json.dumps(plan.to_dict()))
    total_bytes = values.pop("total_bytes")
    assert Plan(**values | {"notes": tuple(values["notes"])}) == plan
    assert total_bytes == plan.weight_bytes + plan.kv_cache_bytes + plan.buffer_bytes
