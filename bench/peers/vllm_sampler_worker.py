"""vLLM's own v1 sampler as a peer: answers JSON lines on stdin with the seconds of one call.

Runs in vLLM's environment. Fields of its SamplingMetadata that this version lacks are left out;
min_p goes through its built-in logits processor. A case that it can't take is answered with
"error".
"""

import argparse
import json
import sys
import time
from dataclasses import fields
from typing import Any

import torch
from sampler_cases import SamplingCase, case_of, history_of, logits_of, mask_of
from vllm import __version__
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler


def min_p_processors(case: SamplingCase, rows: int) -> Any:
    if not case.min_p:
        return LogitsProcessors()
    from vllm.v1.sample.logits_processor.builtin import MinPLogitsProcessor

    made = MinPLogitsProcessor.__new__(MinPLogitsProcessor)
    made.min_p_count = rows
    made.min_p = torch.full((rows, 1), case.min_p)
    return LogitsProcessors([made])


def metadata(case: SamplingCase, rows: int, vocab: int) -> Any:
    history = history_of(case, rows, vocab)
    prompt, output = history.chunk(2, 1) if case.history else (history, history)
    greedy = case.temperature == 0
    values: dict[str, Any] = {
        "temperature": None if greedy else torch.full((rows,), case.temperature),
        "all_greedy": greedy,
        "all_random": not greedy,
        "top_p": torch.full((rows,), case.top_p) if case.top_p < 1 else None,
        "top_k": torch.full((rows,), case.top_k, dtype=torch.int32) if case.top_k else None,
        "generators": {},
        "max_num_logprobs": case.logprobs if case.logprobs >= 0 else None,
        "no_penalties": not case.has_penalties,
        "prompt_token_ids": prompt if case.has_penalties else None,
        "frequency_penalties": torch.full((rows,), case.frequency),
        "presence_penalties": torch.full((rows,), case.presence),
        "repetition_penalties": torch.full((rows,), case.repetition),
        "output_token_ids": output.tolist(),
        "spec_token_ids": [],
        "allowed_token_ids_mask": ~mask_of(rows, vocab) if case.masked else None,
        "bad_words_token_ids": {},
        "logitsprocs": min_p_processors(case, rows),
    }
    known = {field.name for field in fields(SamplingMetadata)}
    return SamplingMetadata(**{k: v for k, v in values.items() if k in known})


@torch.inference_mode()
def answer(sampler: Any, command: dict[str, Any], kept: dict[Any, Any]) -> dict[str, Any]:
    case, rows, vocab = case_of(command["case"]), command["rows"], command["vocab"]
    key = (case.name, rows, vocab)
    if key not in kept:
        kept.clear()
        buffers = [logits_of(case, rows, vocab, seed) for seed in range(command["buffers"])]
        kept[key] = (metadata(case, rows, vocab), buffers)
    given, buffers = kept[key]
    turn, count = command["turn"], len(buffers)
    time.sleep(0.02)  # the threads of the one before fall asleep
    sampler(buffers[(turn + count // 2) % count].clone(), given)
    logits = buffers[turn % count].clone()  # it is overwritten
    begin = time.perf_counter()
    sampler(logits, given)
    return {"seconds": time.perf_counter() - begin}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    torch.set_num_threads(parser.parse_args().threads)
    sampler = Sampler()
    out = sys.stdout
    sys.stdout = sys.stderr  # what vLLM prints is not part of the protocol
    print(json.dumps({"versions": {"vllm": __version__, "torch": torch.__version__}}), file=out)
    out.flush()
    kept: dict[Any, Any] = {}
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "quit":
            break
        try:
            result = answer(sampler, command, kept)
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(result), file=out)
        out.flush()


if __name__ == "__main__":
    main()
