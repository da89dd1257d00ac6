"""torch_npu bodies (Ascend). None yet."""
