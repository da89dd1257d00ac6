"""What the bytes of quantised weights mean, in plain torch."""

from moestro.quant.format import WeightFormat, WeightTensor, float_weight
from moestro.quant.weight import expert, linear, new_rows, quantize, values

__all__ = [
    "WeightFormat",
    "WeightTensor",
    "expert",
    "float_weight",
    "linear",
    "new_rows",
    "quantize",
    "values",
]
