"""The Plan as it is printed: every field, exact, and the total."""

import json

from hypothesis import given
from hypothesis import strategies as st

from moestro.core.plan import Plan
from moestro.core.weight_format import WeightFormat, WeightFormats

SIZES = st.integers(0, 2**62)
FORMATS = st.builds(WeightFormat, st.text(max_size=8), st.integers(0, 128), st.booleans())
PLANS = st.builds(
    Plan,
    **dict.fromkeys(("model", "device", "dtype", "kv_cache_dtype"), st.text(max_size=20)),
    **{
        name: SIZES
        for name, field in Plan.__dataclass_fields__.items()
        if field.type is int or field.type == "int"
    },
    weight_formats=st.builds(
        WeightFormats, FORMATS, FORMATS, FORMATS, st.dictionaries(st.text(), FORMATS, max_size=2)
    ),
    notes=st.lists(st.text(max_size=20), max_size=3).map(tuple),
)


@given(PLANS)
def test_printed_as_json_it_loses_nothing(plan: Plan) -> None:
    values = json.loads(json.dumps(plan.to_dict()))
    total_bytes = values.pop("total_bytes")
    written = values["weight_formats"]
    exceptions = {name: WeightFormat(**f) for name, f in written.pop("exceptions").items()}
    formats = {name: WeightFormat(**f) for name, f in written.items()}
    values["weight_formats"] = WeightFormats(**formats, exceptions=exceptions)
    assert Plan(**values | {"notes": tuple(values["notes"])}) == plan
    parts = (plan.weight_bytes, plan.kv_cache_bytes, plan.buffer_bytes, plan.host_kv_bytes)
    assert total_bytes == sum(parts)
