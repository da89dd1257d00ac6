"""What `moestro bench kernels` measures: calls of ops beside torch's, and the work each does.

These modules import torch and are imported when the benchmark runs.
"""
