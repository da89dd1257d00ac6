"""An engine with tiers below the device: what is built, what is refused, what happens without."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from moestro import LLM, SamplingParams
from moestro.engine import kv_tiers
from moestro.errors import CapacityError, ConfigError
from moestro.runner.kv_tiers import KVTiers
from moestro.weights.source import resolve_model

SMALL: dict[str, Any] = {
    "max_model_len": 128,
    "page_size": 16,
    "num_threads": 1,
    "kv_cache_memory_bytes": 8_000_000,
    "enforce_eager": True,
}
PAGE = 2560 * 16
ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1)


def runner_of(llm: LLM) -> Any:
    return llm._open().engine._runner


def tiers_of(llm: LLM) -> KVTiers | None:
    tiers: KVTiers | None = runner_of(llm)._tiers
    return tiers


def start(tmp_path: Path, **options: Any) -> LLM:
    return LLM(cache_dir=str(tmp_path / "cache"), **SMALL | options)


def test_without_options_nothing_is_below_the_device(tmp_path: Path) -> None:
    with start(tmp_path) as llm:
        assert tiers_of(llm) is None
        assert llm.plan.host_kv_bytes == 0
    assert not (tmp_path / "cache").exists()


def test_a_host_tier_has_the_planned_slots(tmp_path: Path) -> None:
    with start(tmp_path, host_kv_bytes=10 * PAGE + 5) as llm:
        tiers = tiers_of(llm)
        assert tiers is not None
        assert tiers.transfer.page_bytes == PAGE
        assert not tiers.transfer.has_store
        assert llm.plan.num_host_slots == 10
        assert llm.generate("x", ONE_TOKEN, use_tqdm=False)[0].finished
        threads = tiers.transfer._work._threads
    assert not any(thread.is_alive() for thread in threads)


def test_pages_of_every_tier_hold_mtp_layers_where_they_draft(tmp_path: Path) -> None:
    drafting = {"method": "mtp", "num_speculative_tokens": 2}
    with start(tmp_path, host_kv_bytes=10 * PAGE) as llm:
        layers = len(runner_of(llm)._kv_pool.layers)
    with start(tmp_path, host_kv_bytes=10 * PAGE, speculative_config=drafting) as llm:
        tiers = tiers_of(llm)
        assert tiers is not None
        assert len(runner_of(llm)._kv_pool.layers) == layers + 1
        assert tiers.transfer.page_bytes == PAGE * (layers + 1) // layers
        assert llm.plan.kv_bytes_per_token * 16 == tiers.transfer.page_bytes
        assert llm.plan.num_host_slots == 10 * layers // (layers + 1)
    ngram = {"method": "ngram", "num_speculative_tokens": 2}
    with start(tmp_path, speculative_config=ngram) as llm:
        assert len(runner_of(llm)._kv_pool.layers) == layers


def test_a_store_is_opened_under_the_digest_of_the_weights(tmp_path: Path) -> None:
    url = f"lmdb://{tmp_path / 'kv'}"
    with start(tmp_path, kv_store=url) as llm:
        tiers = tiers_of(llm)
        assert tiers is not None
        assert tiers.transfer.has_store
        assert tiers.transfer.state().store_capacity_bytes == 16 * 2**30
    assert (tmp_path / "kv").is_dir()
    (record,) = (tmp_path / "cache" / "digests").iterdir()
    assert len(record.read_text()) == 32


def test_large_weights_keep_the_store_off_until_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_tiers, "EAGER_BYTES", 0)
    waits: list[float] = []
    begin = kv_tiers.StoreOpening.start

    def start_and_tell(self: Any, wait_s: float) -> None:
        waits.append(wait_s)
        begin(self, wait_s)
        self._thread.join(30.0)

    monkeypatch.setattr(kv_tiers.StoreOpening, "start", start_and_tell)
    for _ in range(2):
        with start(tmp_path, kv_store=f"lmdb://{tmp_path / 'kv'}") as llm:
            tiers = tiers_of(llm)
            assert tiers is not None
            assert tiers.transfer.has_store
    assert waits == [0.0, kv_tiers.EAGER_S]  # the second time a record is there


def test_weights_that_change_while_they_load_get_no_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = tmp_path / "model"
    shutil.copytree(resolve_model("tiny-hy3"), model)
    make = kv_tiers.make_tiers

    def change_and_make(*args: Any) -> KVTiers | None:
        file = next(model.glob("*.safetensors"))
        file.write_bytes(file.read_bytes())
        return make(*args)

    monkeypatch.setattr("moestro.engine.build.make_tiers", change_and_make)
    with start(tmp_path, model=str(model), kv_store=f"lmdb://{tmp_path / 'kv'}") as llm:
        tiers = tiers_of(llm)
        assert tiers is not None
        assert not tiers.transfer.has_store
        assert llm.generate("x", ONE_TOKEN, use_tqdm=False)[0].finished
    assert "changed while the model was loaded" in caplog.text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_store": "etcd://x"}, "etcd"),
        ({"kv_store": "/tmp/kv"}, "lmdb://PATH"),
        ({"kv_store": "lmdb://{file}/kv"}, "is no folder"),
        ({"kv_store": "lmdb://{file}"}, "is no folder"),
        ({"kv_store": "lmdb://{folder}", "kv_store_bytes": 1000}, "kv_store_bytes is 1,000"),
        ({"kv_store": "lmdb://{folder}?a=b"}, "mean nothing in a path"),
        ({"kv_store": "lmdb://{folder}", "kv_store_bytes": 8e18}, "kv_store_bytes is 8,000.*addr"),
        ({"kv_store": "lmdb:///proc/x"}, "can't be made a folder"),
        ({"kv_store": "redis://u:se/cret@h:99999/0"}, r"redis://\*\*\*@h:99999/0.*%2F"),
        ({"kv_store": "redis://u:pw@h:0/0"}, r"redis://\*\*\*@h:0/0.*port 0"),
        ({"host_kv_bytes": PAGE - 1}, "not even one page"),
        ({"host_kv_dtype": "int8"}, "needs a host tier"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    (tmp_path / "file").write_text("")
    places = {"file": tmp_path / "file", "folder": tmp_path / "kv"}
    filled = {k: v.format(**places) if isinstance(v, str) else v for k, v in options.items()}
    with pytest.raises(ConfigError, match=words):
        start(tmp_path, **filled)


def test_a_tier_beyond_the_machine_says_what_fits(tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match=r"host_kv_bytes of at most \d+"):
        start(tmp_path, host_kv_bytes="900TB")


def test_a_damaged_store_is_a_tier_less_not_an_engine_less(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "kv"
    folder.mkdir()
    (folder / "data.mdb").write_bytes(b"\x5a" * 100_000)
    with start(tmp_path, kv_store=f"lmdb://{folder}") as llm:
        assert llm.generate("x", ONE_TOKEN, use_tqdm=False)[0].finished
