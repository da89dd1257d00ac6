"""Building blocks of the models: parameters, and the ops that use them."""
