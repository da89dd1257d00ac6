"""Moestro: an inference engine for long-context sparse-MoE language models."""
