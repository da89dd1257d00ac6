"""Run by the python of MOESTRO_PEERS_PYTHON: reads a batch with vLLM's own classes.

stdin: a payload as published. stdout: JSON of what vLLM understood. Exit status 3 without vLLM.
"""

import importlib.util
import json
import sys

if importlib.util.find_spec("vllm") is None:
    sys.exit(3)

import msgspec
from vllm.distributed.kv_events import KVEventBatch

batch = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=KVEventBatch)
told = [{"type": type(e).__name__} | msgspec.structs.asdict(e) for e in batch.events]
json.dump({"ts": batch.ts, "events": told, "rank": batch.data_parallel_rank}, sys.stdout)
