"""What the KV tiers bring and cost: time to first token by tier, and the price of having them.

    python -m bench.kv_tiers MODEL --part ttft|half|idle|decode|throttle|sleepy [--rounds 5]

ttft: a 4K prompt from device, host, store, and computed. half: half of it cached, beside loading
and computing alone. idle: throughput with all tiers on and nothing to hit, beside none. decode:
time per token beside full background traffic at several budgets. throttle: load or recompute at
seven store speeds. sleepy: decode steps with a store whose every call takes 2 s. What is compared
alternates.
"""

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from bench.slow_store import SlowStore

from moestro import LLM, RequestOutput, SamplingParams
from moestro.core.background import lower_priority
from moestro.core.model_config import load_model_spec
from moestro.core.page_moves import Move, MoveKind
from moestro.kvcache import fetcher
from moestro.kvstore import open_store
from moestro.runner.host_pool import HostPool
from moestro.runner.transfer import PageTransfer, TransferLimits
from moestro.weights.source import resolve_model

FIRST = SamplingParams(temperature=0.0, max_tokens=1)
GB = 1e9
RATES = (256 << 20, 128 << 20, 64 << 20, 32 << 20)
PER_REFILL, REFILL_S = 8, 0.05  # of pages and puts: more than the highest rate moves
write = sys.stdout.write


def prompt(seed: int, num_tokens: int, vocab: int = 30_000) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(3, vocab, num_tokens).tolist()
    return tokens


def ask(llm: LLM, tokens: Sequence[int]) -> RequestOutput:
    return llm.generate([list(tokens)], FIRST, use_tqdm=False)[0]


def ttft(llm: LLM, tokens: Sequence[int]) -> float:
    output = ask(llm, tokens)
    assert output.timing is not None
    assert output.timing.first_token_s is not None
    return output.timing.first_token_s


def settle(llm: LLM) -> None:
    """Until all pages have sunk."""
    engine = llm._open().engine
    while engine.tend():
        transfer_of(llm).wait(1.0)


def transfer_of(llm: LLM) -> PageTransfer:
    return llm._open().engine._runner._tiers.transfer  # type: ignore[attr-defined,no-any-return]


def start(model: str, num_tokens: int, **options: Any) -> LLM:
    """Device memory for one prompt of num_tokens and little more, so that the next one evicts."""
    spec = load_model_spec(resolve_model(model))
    page_bytes = 64 * spec.kv_bytes_per_token(element_bytes=2)
    pages = num_tokens // 64 + 3
    sized = {"kv_cache_memory_bytes": pages * page_bytes, "max_model_len": num_tokens + 63}
    llm = LLM(model, **sized | options)
    if "kv_store" in options:
        while not transfer_of(llm).has_store:
            time.sleep(0.05)
    return llm


def row(name: str, times: Sequence[float], base: float | None = None) -> None:
    middle = statistics.median(times)
    ratio = f"  {base / middle:8.1f}x faster than computed" if base else ""
    write(f"{name:28}{middle * 1e3:10.1f} ms  ({min(times) * 1e3:.1f} to {max(times) * 1e3:.1f})")
    write(f"{ratio}\n")
    sys.stdout.flush()


def part_ttft(model: str, rounds: int, folder: str) -> None:
    """One prompt fits the device; the one before it is in the host tier."""
    num_tokens = 4097
    prompts = [prompt(i, num_tokens) for i in range(rounds + 1)]
    options = {"kv_store": f"lmdb://{folder}/kv", "kv_background_bytes_per_s": 0}
    times: dict[str, list[float]] = {"computed": [], "device": [], "host": [], "store": []}
    with start(model, num_tokens, host_kv_bytes="2GiB", **options) as llm:
        ask(llm, prompt(99, 300))
        for i, tokens in enumerate(prompts):
            times["computed"].append(ttft(llm, tokens))
            settle(llm)
            times["device"].append(ttft(llm, tokens))
            if i:
                times["host"].append(ttft(llm, prompts[i - 1]))
            settle(llm)
    with start(model, num_tokens, host_kv_bytes="2GiB", **options) as llm:
        ask(llm, prompt(98, 300))
        for tokens in prompts:
            output = ask(llm, tokens)
            assert output.timing is not None
            assert output.timing.prefix.store_tokens == 4096, output.timing
            times["store"].append(output.timing.first_token_s or 0.0)
    write(f"time to first token, {num_tokens} tokens, 4,096 of them cached\n")
    base = statistics.median(times["computed"])
    for name, found in times.items():
        row(name, found, None if name == "computed" else base)


def part_half(model: str, rounds: int, folder: str) -> None:
    """The first half cached: in the device (no load), in the host, in the store."""
    num_tokens, half = 4096, 2048
    options = {"kv_store": f"lmdb://{folder}/kv", "kv_background_bytes_per_s": 0}
    head = prompt(1, half)
    found: dict[str, list[RequestOutput]] = {"device": [], "host": [], "store": []}
    with start(model, num_tokens, host_kv_bytes="2GiB", **options) as llm:
        ask(llm, [*head, 5])
        settle(llm)
        for i in range(rounds):
            for tier in ("device", "host"):
                # the tail of the last one filled the rest of the device: its head is still there
                if tier == "host":
                    ask(llm, prompt(500 + i, num_tokens - 10))
                    settle(llm)
                tail = prompt(100 + 2 * i + (tier == "host"), num_tokens - half)
                found[tier].append(ask(llm, [*head, *tail]))
                settle(llm)
    for i in range(min(rounds, 3)):
        with start(model, num_tokens, host_kv_bytes="2GiB", **options) as llm:
            ask(llm, prompt(97, 300))
            found["store"].append(ask(llm, [*head, *prompt(900 + i, num_tokens - half)]))
    write(f"{num_tokens} tokens, {half} of them cached; computed rest = first line\n")
    alone = statistics.median(o.timing.first_token_s for o in found["device"])  # type: ignore
    for tier, outputs in found.items():
        times = [o.timing.first_token_s for o in outputs]  # type: ignore[union-attr]
        row(tier, times)  # type: ignore[arg-type]
        t = outputs[-1].timing
        assert t is not None
        assert t.prefill_s is not None
        p = t.prefix
        load_s = p.load_host_s + p.load_store_s
        ratio = statistics.median(times) / max(load_s, alone)  # type: ignore[type-var]
        write(
            f"  {ratio:.3f} of max(load, rest). Timeline: lookup {p.lookup_s * 1e3:.1f} ms, from "
            f"the store {p.load_store_s * 1e3:.1f} ms, queue in all {t.queue_s * 1e3:.1f} ms | "
            f"prefill {t.prefill_s * 1e3:.1f} ms, layers loaded in {p.load_host_s * 1e3:.1f} ms\n"
        )


def part_idle(model: str, rounds: int, folder: str) -> None:
    """Prompts that were never seen, with all tiers on and with none."""
    params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    common = {"kv_cache_memory_bytes": "700MB", "max_model_len": 2048}
    tiers = {"kv_store": f"lmdb://{folder}/kv", "host_kv_bytes": "1GiB"}
    with LLM(model, **common) as off, LLM(model, **common, **tiers) as on:
        ratios = []
        for i in range(-1, 2 * rounds):
            seconds = {}
            for llm in (off, on) if i % 2 else (on, off):
                prompts = [prompt(1000 * i + j + 2000, 256) for j in range(8)]
                begin = time.perf_counter()
                llm.generate(prompts, params, use_tqdm=False)
                seconds[llm is on] = time.perf_counter() - begin
                if llm is on:
                    settle(llm)
            if i >= 0:
                ratios.append(seconds[False] / seconds[True])
        write(f"throughput, tiers on / off: {statistics.median(ratios):.3f} ({spread(ratios)})\n")


def spread(values: Sequence[float]) -> str:
    low, high = np.quantile(values, (0.25, 0.75))
    whole = f"{min(values):.3f} to {max(values):.3f}"
    return f"middle half {low:.3f} to {high:.3f}, all {whole}, {len(values)} pairs"


def part_decode(model: str, rounds: int, folder: str) -> None:
    """Four sequences decode; every other time a mover of its own saves and puts all the while."""
    params = SamplingParams(temperature=0.0, max_tokens=33, ignore_eos=True)
    for rate in RATES:
        with LLM(model, kv_cache_memory_bytes="500MB", max_model_len=1024) as llm:
            host = HostPool(llm._open().engine._runner._kv_pool, 64)  # type: ignore[attr-defined]
            mover = PageTransfer(
                host, TransferLimits(background_bytes_per_s=rate, max_queued_bytes=1 << 24)
            )
            mover.attach(
                open_store(
                    f"lmdb://{folder}/{rate}",
                    digest=b"d" * 16,
                    capacity_bytes=4 << 30,
                    sync="batch",
                )
            )
            ratios, moved, took = [], 0, 0.0
            for i in range(-1, 2 * rounds):
                tpot: dict[bool, float] = {}
                for busy in (False, True) if i % 2 else (True, False):
                    with traffic(mover, busy) as count:
                        prompts = [prompt(i * 100 + j + 200, 64) for j in range(4)]
                        outputs = llm.generate(prompts, params, use_tqdm=False)
                    tpot[busy] = statistics.median(
                        o.timing.decode_s / 32  # type: ignore[union-attr,operator]
                        for o in outputs
                    )
                    moved += count[0]
                    took += count[1]
                if i >= 0:
                    ratios.append(tpot[True] / tpot[False])
            name = f"{rate / GB:.2f} GB/s" if rate else "no limit"
            write(
                f"background {name}: moved {moved / took / GB:.2f} GB/s, time per token "
                f"{statistics.median(ratios):.3f} of that without ({spread(ratios)})\n"
            )
            sys.stdout.flush()
            mover.close(10.0)


def next_key(number: int) -> bytes:
    """Never the same one: a key that is stored is not written again."""
    return number.to_bytes(8, "little") + time.monotonic_ns().to_bytes(8, "little")


@contextmanager
def traffic(mover: PageTransfer, busy: bool) -> Iterator[list[float]]:
    """Saves and puts, as many as are taken, until left; bytes moved and seconds then."""
    count = [0.0, 0.0]
    if not busy:
        yield count
        return
    stop = threading.Event()

    def work() -> None:
        lower_priority()  # in an engine the step submits: no thread wakes up for it
        number = 0
        while not stop.is_set():
            for _ in range(PER_REFILL):
                number += 1
                slot, key = number % 64, next_key(number)
                mover.submit(Move(2 * number, MoveKind.SAVE, pages=(slot,), slots=(slot,)))
                mover.submit(Move(2 * number + 1, MoveKind.PUT, keys=(key,), slots=(slot,)))
            stop.wait(REFILL_S)
            count[0] += sum(r.num_bytes for r in mover.poll())

    thread = threading.Thread(target=work)
    begin = time.perf_counter()
    thread.start()
    try:
        yield count
    finally:
        stop.set()
        thread.join()
        count[1] = time.perf_counter() - begin
        while mover.state().num_queued_bytes:
            mover.wait(0.1)
            mover.poll()


def part_throttle(model: str, rounds: int, folder: str) -> None:
    """Prompts that are in the store only, read at several speeds: chosen, always read, computed."""
    num_tokens = 1025
    prompts = [prompt(i, num_tokens) for i in range(3)]
    options = {
        "kv_store": f"lmdb://{folder}/kv",
        "kv_background_bytes_per_s": 0,
        "kv_store_timeout_s": 30.0,
    }
    chosen = fetcher.should_load
    with start(model, num_tokens, **options) as llm:
        work = transfer_of(llm)._work
        for tokens in prompts:
            ask(llm, tokens)
            settle(llm)
        assert work.store is not None
        work.store = slow = SlowStore(work.store)
        computed = statistics.median(ttft(llm, prompt(50 + i, num_tokens)) for i in range(rounds))
        write(f"{num_tokens} tokens of which 1,024 are stored; computed {computed * 1e3:.0f} ms\n")
        number = 0
        for mbps in (10, 20, 30, 50, 100, 300, 0):
            slow.bytes_per_s = mbps * 1e6
            times: dict[bool, list[float]] = {False: [], True: []}
            for i in range(-1, rounds):
                for forced in (True, False):
                    fetcher.should_load = (lambda *_: True) if forced else chosen  # type: ignore
                    number += 1
                    took = ttft(llm, prompts[number % 3])
                    settle(llm)
                    if i >= 0:
                        times[forced].append(took)
            auto, load = (statistics.median(times[f]) for f in (False, True))
            name = f"{mbps} MB/s" if mbps else "unthrottled"
            write(
                f"{name:12} chosen {auto * 1e3:7.0f} ms, read {load * 1e3:7.0f} ms: "
                f"{auto / min(load, computed):.3f} of the better\n"
            )
            sys.stdout.flush()
        fetcher.should_load = chosen


def part_sleepy(model: str, rounds: int, folder: str) -> None:
    """Step times of four decoding sequences while others come and go."""
    common = {"kv_cache_memory_bytes": "200MB", "max_model_len": 2048, "enforce_eager": False}
    tiers = {"kv_store": f"lmdb://{folder}/kv", "host_kv_bytes": "100MB"}
    with LLM(model, **common) as off, LLM(model, **common, **tiers) as on:
        work = transfer_of(on)._work
        while work.store is None:
            time.sleep(0.05)
        work.store = SlowStore(work.store, call_s=2.0)
        p99: dict[bool, list[float]] = {False: [], True: []}
        for i in range(rounds):
            for llm in (off, on) if i % 2 else (on, off):
                p99[llm is on].append(step_p99(llm, i))
        for is_on, found in p99.items():
            row("p99, store sleeps 2 s" if is_on else "p99, no tiers", found)
        moved = statistics.median(p99[True]) - statistics.median(p99[False])
        write(f"the step's p99 moves by {moved * 1e3:+.3f} ms\n")


def step_p99(llm: LLM, number: int) -> float:
    built = llm._open()
    long = SamplingParams(temperature=0.0, max_tokens=1500, ignore_eos=True)

    def add(i: int, params: SamplingParams) -> None:
        ids = prompt(number * 10_000 + i, 200, 500)
        name = f"{number}-{i}"
        built.engine.add_request(built.processor.process(ids, params, request_id=name))

    for i in range(4):
        add(i, long)
    times = []
    for step in range(2000):
        if step % 40 == 20:
            add(100 + step, FIRST)
        num_before = built.engine.stats().num_steps
        begin = time.perf_counter()
        built.engine.step()
        took = time.perf_counter() - begin
        stats = built.engine.stats()
        # neither a prompt in it, nor a rest because all requests wait for the store
        if stats.num_steps > num_before and 0 < stats.last_step_tokens <= 6:
            times.append(took)
    built.engine.abort_all()
    built.engine.discard_pending()
    return float(np.quantile(times[50:], 0.99))


PARTS = {
    "ttft": part_ttft,
    "half": part_half,
    "idle": part_idle,
    "decode": part_decode,
    "throttle": part_throttle,
    "sleepy": part_sleepy,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="of the store (default: a temporary one)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="moestro-kv-") as folder:
        PARTS[args.part](args.model, args.rounds, folder)


if __name__ == "__main__":
    main()
