"""Executes schedules on a model: inputs, KV memory, forward pass, sampling."""
