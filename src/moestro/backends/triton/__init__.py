"""Triton bodies (NVIDIA). None yet."""
