"""Packed weights on disk: the second start maps, damage is packed again, never wrong."""

import fcntl
import multiprocessing
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from moestro import LLM, SamplingParams
from moestro.core.weight_format import WeightFormat
from moestro.engine import planned_model
from moestro.layers.parameters import Parameter
from moestro.quant import new_rows, quantize, values
from moestro.weights import packed_cache
from moestro.weights.fingerprint import fingerprint
from moestro.weights.packed_cache import PackedCache, cache_key, cached_files, clear, named_tensors

KEY = cache_key({"a": 1})
LARGE = 2**16
"""Bytes of the last tensor."""


def drawn(seed: int = 0) -> dict[str, Parameter]:
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(3, 10, 64, generator=generator)
    return {
        "norm": torch.randn(7, generator=generator).bfloat16(),
        "empty": torch.empty(0),
        "experts": quantize(w, WeightFormat("w4a8", 32, has_zeros=True), paired=True),
        "linear": quantize(w[0], WeightFormat("fp8")),
        "table": torch.randn(LARGE // 4, generator=generator),
    }


def unfilled() -> dict[str, Parameter]:
    return {
        "norm": torch.zeros(7, dtype=torch.bfloat16),
        "empty": torch.empty(0),
        "experts": new_rows(WeightFormat("w4a8", 32, has_zeros=True), (3, 10, 64), paired=True),
        "linear": new_rows(WeightFormat("fp8"), (10, 64)),
        "table": torch.zeros(LARGE // 4),
    }


def same(left: dict[str, Parameter], right: dict[str, Parameter]) -> bool:
    pairs = zip(named_tensors(left), named_tensors(right), strict=True)
    return all(
        n == m and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for (n, a), (m, b) in pairs
        if a.numel()
    )


@pytest.fixture
def cache(tmp_path: Path) -> PackedCache:
    return PackedCache(tmp_path / "weights", 2**20)


@pytest.fixture
def file(cache: PackedCache, tmp_path: Path) -> Path:
    assert cache.write(KEY, drawn())
    (path,) = (tmp_path / "weights").iterdir()
    return path


def test_round_trip(cache: PackedCache) -> None:
    assert not cache.attach(KEY, unfilled())
    assert cache.write(KEY, drawn())
    got = unfilled()
    assert cache.attach(KEY, got)
    assert same(got, drawn())
    linear = got["linear"]
    assert not isinstance(linear, torch.Tensor)
    assert linear.codes.data_ptr() % packed_cache.ALIGNMENT == 0
    assert values(linear).isfinite().all()


def test_other_facts_are_another_file(cache: PackedCache, file: Path) -> None:
    assert not cache.attach(cache_key({"a": 2}), unfilled())
    assert cache_key({"a": 2}) != KEY
    assert file.exists()


def _flip(at: int) -> Callable[[bytearray], bytearray]:
    def change(data: bytearray) -> bytearray:
        data[at] ^= 0x40
        return data

    return change


DAMAGE: dict[str, Callable[[bytearray], bytearray]] = {
    "empty": lambda _: bytearray(),
    "cut in the header": lambda d: d[:40],
    "cut in the data": lambda d: d[:-1],
    "grown": lambda d: d + b"\0",
    "other magic": _flip(0),
    "other header length": _flip(16),
    "longest header length": lambda d: d[:16] + b"\xff" * 8 + d[24:],
    "other digest": _flip(30),
    "other header": _flip(70),
    "other data": _flip(packed_cache.ALIGNMENT),
    "other data amid a tensor": _flip(-packed_cache.ALIGNMENT - LARGE // 2),
    "a hole amid a tensor": lambda d: d[: -LARGE // 2 - 4096] + bytes(4096) + d[-LARGE // 2 :],
    "blocks in each other's place": lambda d: (
        d[: -LARGE // 2]
        + d[-LARGE // 2 + 4096 : -LARGE // 2 + 8192]
        + d[-LARGE // 2 : -LARGE // 2 + 4096]
        + d[-LARGE // 2 + 8192 :]
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_noticed_and_packed_again(damage: str, cache: PackedCache, file: Path) -> None:
    file.write_bytes(DAMAGE[damage](bytearray(file.read_bytes())))
    got = unfilled()
    before = {n: t.data_ptr() for n, t in named_tensors(got)}
    assert not cache.attach(KEY, got)
    assert {n: t.data_ptr() for n, t in named_tensors(got)} == before, "nothing was attached"
    assert not file.exists()
    assert cache.write(KEY, drawn())
    assert cache.attach(KEY, got)
    assert same(got, drawn())


def test_links_and_pipes_are_not_followed(cache: PackedCache, tmp_path: Path) -> None:
    folder, precious = tmp_path / "weights", tmp_path / "precious"
    folder.mkdir()
    precious.write_text("mine")
    (folder / f"{KEY}.partial").symlink_to(precious)
    (folder / f"{KEY}.weights").symlink_to("/dev/zero")
    assert not cache.attach(KEY, unfilled())
    cache.write(KEY, drawn())
    assert precious.read_text() == "mine"
    for suffix in ("partial", "weights"):
        path = folder / f"{KEY}.{suffix}"
        path.unlink(missing_ok=True)
        os.mkfifo(path)
    assert not cache.attach(KEY, unfilled())
    cache.write(KEY, drawn())


def test_weights_written_in_place_and_dated_back_are_others(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(2**23))  # larger than what is sampled
    dated, before = path.stat(), fingerprint([path])
    assert fingerprint([path]) == before
    with path.open("r+b") as file:
        file.seek(2**16 + 2**10)  # between the first two samples
        file.write(b"\1")
    os.utime(path, ns=(dated.st_atime_ns, dated.st_mtime_ns))
    assert path.stat().st_mtime_ns == dated.st_mtime_ns
    assert fingerprint([path]) != before


def test_another_version_is_packed_again(
    cache: PackedCache, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_cache, "VERSION", packed_cache.VERSION + 1)
    assert not cache.attach(KEY, unfilled())
    assert not file.exists()


def test_another_model_under_the_same_key_is_refused(cache: PackedCache, file: Path) -> None:
    other = unfilled()
    other["norm"] = torch.zeros(8, dtype=torch.bfloat16)
    assert not cache.attach(KEY, other)
    other = unfilled()
    del other["norm"]
    assert not cache.attach(KEY, other)


def _hold(path: str, ready: "multiprocessing.synchronize.Event") -> None:
    with open(path, "ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        held.write(b"half a file")
        held.flush()
        ready.set()
        while True:
            fcntl.flock(held, fcntl.LOCK_EX)
            ready.wait()
            multiprocessing.Event().wait(60)


@pytest.fixture
def other_writer(tmp_path: Path) -> Iterator[Path]:
    """A process that is writing the file under KEY; the temporary file's path."""
    folder = tmp_path / "weights"
    folder.mkdir()
    path = folder / f"{KEY}.partial"
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=_hold, args=(str(path), ready))
    process.start()
    assert ready.wait(60)
    yield path
    process.kill()
    process.join()


def test_being_written_by_another_process(
    cache: PackedCache, other_writer: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert not cache.attach(KEY, unfilled())
    with caplog.at_level("INFO", logger="moestro"):
        assert not cache.write(KEY, drawn()), "the other one writes it"
    assert f"{KEY} is being written" in caplog.text
    assert other_writer.read_bytes() == b"half a file"
    assert clear(other_writer.parent) == 0
    assert other_writer.exists()


def test_what_a_dead_writer_left_is_deleted(cache: PackedCache, tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    left = [tmp_path / "weights" / f"{name}.partial" for name in (KEY, "other")]
    for path in left:
        path.write_bytes(b"half")
    assert cache.write(KEY, drawn())
    assert not any(path.exists() for path in left)
    assert cache.attach(KEY, unfilled())


def test_files_used_longest_ago_go_first(cache: PackedCache, file: Path, tmp_path: Path) -> None:
    size = file.stat().st_size
    small = PackedCache(tmp_path / "weights", int(2.5 * size))
    keys = [cache_key({"n": n}) for n in range(3)]
    for i, key in enumerate((KEY, keys[0])):
        if key != KEY:
            assert small.write(key, drawn())
        os.utime(tmp_path / "weights" / f"{key}.weights", (1000 + i, 1000 + i))
    assert small.attach(KEY, unfilled()), "used again, and so younger"
    assert small.write(keys[1], drawn())
    names = {f.path.stem for f in cached_files(tmp_path / "weights")}
    assert names == {KEY, keys[1]}
    assert not PackedCache(tmp_path / "weights", size - 1).write(keys[2], drawn())
    assert clear(tmp_path / "weights") == 2 * size
    assert cached_files(tmp_path / "weights") == []


def test_what_is_mapped_outlives_replacing_evicting_and_clearing(
    cache: PackedCache, file: Path
) -> None:
    """Writers rename and unlink: nobody's mapped pages are written or cut off."""
    mapped = unfilled()
    assert cache.attach(KEY, mapped)
    assert cache.write(KEY, drawn(1))
    assert same(mapped, drawn())
    tight = PackedCache(file.parent, file.stat().st_size)
    assert tight.write(cache_key({"a": 2}), drawn(2))
    assert not file.exists()
    assert clear(file.parent) > 0
    assert same(mapped, drawn())


def test_a_folder_that_cannot_be_written_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = PackedCache(tmp_path / "file" / "weights", 2**20)
    assert not cache.attach(KEY, unfilled())
    assert not cache.write(KEY, drawn())


@pytest.mark.parametrize("quantization", ["none", "w8a8"])
def test_the_second_start_packs_nothing_and_gives_the_same_bits(
    quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[object] = []
    real = planned_model.load_weights
    monkeypatch.setattr(
        planned_model,
        "load_weights",
        lambda *args, **kw: (loads.append(args), real(*args, **kw))[1],
    )
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=2)
    options = {
        "quantization": quantization, "weight_cache": str(tmp_path), "max_model_len": 64,
        "kv_cache_memory_bytes": "16MiB",
    }  # fmt: skip
    found = []
    for _ in range(2):
        with LLM("tiny-hy3", **options) as llm:
            out = llm.generate(["def f(x):"], params)[0].outputs[0]
            found.append((out.token_ids, out.logprobs))
    assert len(loads) == 1
    assert found[0] == found[1]
    (file,) = cached_files(tmp_path)
    file.path.write_bytes(file.path.read_bytes()[:-1])
    with LLM("tiny-hy3", **options) as llm:
        out = llm.generate(["def f(x):"], params)[0].outputs[0]
    assert (out.token_ids, out.logprobs) == found[0]
    assert len(loads) == 2
