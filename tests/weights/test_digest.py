"""WeightsDigest: tells any two checkpoints apart, reads a file once, notices changes."""

import os
import time
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import save_file

from moestro.weights import digest as module
from moestro.weights.digest import FOLDER, WeightsChangedError, WeightsDigest


def write(path: Path, value: float = 1.0, name: str = "w") -> Path:
    save_file({name: torch.full((64, 3), value)}, path)
    return path


def of(cache: Path, *paths: Path) -> str:
    found = WeightsDigest(paths, cache).compute()
    assert found is not None
    return found


def test_equal_files_have_equal_digests_wherever_they_lie(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = of(tmp_path / "c", write(tmp_path / "a" / "m.safetensors"))
    assert of(tmp_path / "c", write(tmp_path / "b" / "m.safetensors")) == first
    assert of(tmp_path / "other cache", tmp_path / "a" / "m.safetensors") == first


def test_one_number_one_name_and_one_file_more_count(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors")
    more = write(tmp_path / "n.safetensors")
    cache = tmp_path / "cache"
    digests = {of(cache, path), of(cache, path, more), of(cache, more)}
    digests.add(of(cache, write(path, 1.0000001)))  # a fine-tune of equal shapes
    digests.add(of(cache, write(path, name="v")))
    assert len(digests) == 5


def test_a_second_start_reads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, cache = write(tmp_path / "m.safetensors"), tmp_path / "cache"
    assert WeightsDigest([path], cache).known() is None
    first = of(cache, path)
    (record,) = (cache / FOLDER).iterdir()
    assert record.read_text() == xxhash.xxh3_128(path.read_bytes()).hexdigest()

    def fail(*_: object) -> None:
        raise AssertionError("the file is read again")

    monkeypatch.setattr(module, "_digest_file", fail)
    again = WeightsDigest([path], cache)
    assert again.known() == again.compute() == first
    assert again.num_bytes == path.stat().st_size


def test_weights_in_place_and_dated_back_are_noticed(tmp_path: Path) -> None:
    path, cache = write(tmp_path / "m.safetensors"), tmp_path / "cache"
    first, stat = of(cache, path), path.stat()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1  # the data: the header stays
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert path.stat().st_mtime_ns == stat.st_mtime_ns
    assert path.stat().st_ino == stat.st_ino
    assert WeightsDigest([path], cache).known() is None
    assert of(cache, path) != first


def test_a_file_that_changes_while_it_is_loaded_has_no_digest(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors")
    asked = WeightsDigest([path], tmp_path / "cache")
    write(path, 2.0)
    with pytest.raises(WeightsChangedError, match=r"m\.safetensors changed"):
        asked.compute()
    assert not (tmp_path / "cache").exists()


def test_a_record_does_not_vouch_for_a_file_replaced_while_it_is_loaded(tmp_path: Path) -> None:
    path, cache = write(tmp_path / "m.safetensors"), tmp_path / "cache"
    of(cache, path)
    before = WeightsDigest([path], cache)
    assert before.known() is not None
    write(tmp_path / "new", 2.0).replace(path)  # the loader reads this one
    with pytest.raises(WeightsChangedError, match="changed while"):
        before.compute()


@pytest.mark.parametrize("text", ["", "zz" * 16, "ab" * 15, "\xff" * 32])
def test_a_damaged_record_is_made_anew(tmp_path: Path, text: str) -> None:
    path, cache = write(tmp_path / "m.safetensors"), tmp_path / "cache"
    first = of(cache, path)
    (record,) = (cache / FOLDER).iterdir()
    record.write_bytes(text.encode("latin-1"))
    assert WeightsDigest([path], cache).known() is None
    assert of(cache, path) == first
    assert WeightsDigest([path], cache).known() == first


def test_a_folder_that_cannot_be_written_costs_time_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "m.safetensors")
    (tmp_path / "file").write_text("")
    first = of(tmp_path / "file" / "cache", path)
    assert "can't be kept" in caplog.text
    assert first == of(tmp_path / "cache", path)


def test_it_stops_when_asked_and_keeps_few_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, cache = write(tmp_path / "m.safetensors"), tmp_path / "cache"
    assert WeightsDigest([path], cache).compute(lambda: True) is None
    monkeypatch.setattr(module, "MAX_RECORDS", 4)
    for i in range(9):
        of(cache, write(path, float(i)))
        assert len(list((cache / FOLDER).iterdir())) <= 4
    assert WeightsDigest([path], cache).known() is not None
    with pytest.raises(FileNotFoundError):
        WeightsDigest([tmp_path / "none"], cache)


def test_a_file_that_was_just_written_is_waited_for(tmp_path: Path) -> None:
    """A write in the same tick of the file system's clock would leave its times as they are."""
    path = write(tmp_path / "m.safetensors")
    WeightsDigest([path], tmp_path / "cache")
    assert time.time_ns() - path.stat().st_ctime_ns >= module._TICK_NS


def test_no_record_of_a_file_from_the_future(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor of one on a file system whose clock is ahead: another write may go unseen."""
    path, cache = write(tmp_path / "m.safetensors"), tmp_path / "cache"
    monkeypatch.setattr(module.time, "time_ns", lambda: path.stat().st_ctime_ns - 10**12)
    monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
    first = of(cache, path)
    assert not (cache / FOLDER).exists()
    monkeypatch.undo()
    assert of(cache, path) == first
    assert len(list((cache / FOLDER).iterdir())) == 1
