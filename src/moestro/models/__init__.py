"""The model families, one file a model_type."""
