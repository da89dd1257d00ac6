"""Host cost of the scheduler: microseconds per decode step, and of admitting a long cached prompt.

    python bench/scheduler.py [--steps 2000] [--page-size 64]

The runner is a stub that answers at once, and its own time is not counted.
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable

from moestro.core.request import Request
from moestro.core.sampling_params import SamplingParams
from moestro.core.step import Schedule, SequenceOutput, StepOutput
from moestro.kvcache import KVCacheManager
from moestro.scheduler import Scheduler, SchedulerLimits

MAX_LEN = 1 << 20


def answer(schedule: Schedule) -> StepOutput:
    """Token 7 for every run that samples."""
    return StepOutput(
        schedule.step_id,
        tuple(SequenceOutput(r.seq_id, (7,) if r.samples else ()) for r in schedule.sequences),
    )


def request(name: str, num_prompt_tokens: int, max_tokens: int) -> Request:
    """A greedy request whose prompt starts with its own name, so that it shares nothing."""
    first = sum(name.encode())
    prompt = (first, *(i % 50_000 for i in range(num_prompt_tokens - 1)))
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        params=SamplingParams(temperature=0.0, max_tokens=max_tokens),
        seed=0,
        max_tokens=max_tokens,
        stop_token_ids=frozenset((1, 2)),
        eos_token_ids=frozenset((1, 2)),
    )


def make_scheduler(num_pages: int, page_size: int) -> Scheduler:
    kv = KVCacheManager(num_pages, page_size, enable_prefix_caching=True)
    return Scheduler(SchedulerLimits(128, 2048, MAX_LEN), kv)


def decode_step_us(batch: int, steps: int, page_size: int) -> dict[str, float]:
    """Cost of schedule, update and stats of pure decode steps with `batch` sequences."""
    pages = batch * (1024 + steps + 8) // page_size + 4 * batch
    scheduler = make_scheduler(pages, page_size)
    for i in range(batch):
        scheduler.add(request(chr(1000 + i), 1000, steps + 1000))
    num_rows = 0
    while num_rows < batch:
        schedule = scheduler.schedule()
        assert schedule is not None
        scheduler.update(schedule, answer(schedule))
        num_rows = sum(r.num_tokens == 1 for r in schedule.sequences)
    plan, apply, whole = [], [], []
    clock: Callable[[], int] = time.perf_counter_ns
    for _ in range(steps):
        t0 = clock()
        schedule = scheduler.schedule()
        t1 = clock()
        assert schedule is not None
        assert len(schedule.sequences) == batch
        output = answer(schedule)
        t2 = clock()
        scheduler.update(schedule, output)
        scheduler.stats()
        t3 = clock()
        plan.append(t1 - t0)
        apply.append(t3 - t2)
        whole.append(t1 - t0 + t3 - t2)
    return {
        "schedule": statistics.median(plan) / 1e3,
        "update": statistics.median(apply) / 1e3,
        "both": statistics.median(whole) / 1e3,
        "p99": sorted(whole)[len(whole) * 99 // 100] / 1e3,
    }


def long_prompt_ms(num_tokens: int, page_size: int) -> dict[str, float]:
    """Cost of a long prompt: packing its tokens, admitting it from the cache, releasing it."""
    scheduler = make_scheduler(2 * num_tokens // page_size, page_size)
    scheduler.add(request("a", num_tokens, 1))
    while scheduler.has_work():
        schedule = scheduler.schedule()
        assert schedule is not None
        scheduler.update(schedule, answer(schedule))
    again = request("a", num_tokens, 1)
    t0 = time.perf_counter_ns()
    scheduler.add(again)
    t1 = time.perf_counter_ns()
    schedule = scheduler.schedule()
    t2 = time.perf_counter_ns()
    assert schedule is not None
    assert schedule.num_tokens <= page_size
    output = answer(schedule)
    t3 = time.perf_counter_ns()
    scheduler.update(schedule, output)
    t4 = time.perf_counter_ns()
    return {"add": (t1 - t0) / 1e6, "schedule": (t2 - t1) / 1e6, "release": (t4 - t3) / 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--page-size", type=int, default=64)
    args = parser.parse_args()
    gc.disable()
    out = sys.stdout.write
    columns = ("batch", "schedule us", "update us", "both us", "p99 us", "us/seq")
    out(" ".join(f"{name:>11}" for name in columns) + "\n")
    for batch in (1, 16, 128):
        row = decode_step_us(batch, args.steps, args.page_size)
        values = (*row.values(), row["both"] / batch)
        out(f"{batch:>11} " + " ".join(f"{value:>11.2f}" for value in values) + "\n")
    for num_tokens in (20_000, 200_000):
        tries = [long_prompt_ms(num_tokens, args.page_size) for _ in range(5)]
        row = {name: min(one[name] for one in tries) for name in tries[0]}
        out(
            f"prompt of {num_tokens} tokens, all cached: add {row['add']:.2f} ms (packing), "
            f"schedule {row['schedule']:.2f} ms, last update with release {row['release']:.2f} ms\n"
        )


if __name__ == "__main__":
    main()
