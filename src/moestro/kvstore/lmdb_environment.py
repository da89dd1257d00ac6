"""One LMDB environment on disk, opened once a process, and who may write to it when.

What LMDB leaves to its users, and why it is here:
- An environment must not be opened twice in one process (its locks belong to the process), but
  several engines may live in one: openings are shared and counted.
- Its writers wait for each other without a limit, so a stopped process would stop all others. A
  lock of our own comes first, taken with a deadline; it is a record lock, which a forked child
  doesn't inherit and which ends with its process.
- It trusts its file: a damaged one can crash the reader. Its structure is walked before it is
  opened, while no other process writes. It is never opened with a writable map: a full disk would
  be a fatal signal, and a crash of the machine could tear it.
- It must not be used, nor opened again, in a forked child while it holds its parent's: that is
  let go of there.
"""

import contextlib
import errno
import fcntl
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmdb
from lmdb import verify as structure

from moestro.core.page_moves import MoveFailure
from moestro.core.page_store import StoreError
from moestro.kvstore.backend import Deadline
from moestro.kvstore.data_file import DataFile, cache_left_alone

logger = logging.getLogger(__name__)

FORMAT = b"moestro kv 2"
TABLES = (b"pages", b"index", b"uses", b"totals", b"meta")
DATA_FILE, LOCK_FILE = "data.mdb", "writer.lock"
# EIO: LMDB's answer when the system took only a part of a write, as a full disk does first.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.001, 0.02
# Bytes of the lock file that are locked: by the writer; by every process that has it open.
_WRITER, _USERS = 0, 1


class LmdbEnvironment:
    """Tables of one folder. Get it from `shared`; `release` it as often.

    capacity_bytes 0: the budget that whoever wrote last had.
    """

    def __init__(self, folder: Path, capacity_bytes: int, sync: str, deadline: Deadline) -> None:
        self.folder = folder
        self.capacity_bytes = capacity_bytes
        self.sync = sync
        self._pid = os.getpid()
        self._file: DataFile | None = None
        self._is_gone = False
        self._readers = threading.Lock()
        self._writers = threading.Lock()
        with _translated(folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            self._lock_fd = os.open(folder / LOCK_FILE, flags, 0o600)
        try:
            with self._writer_lock(deadline):
                self._open(is_alone=self._try_lock(_USERS))
                fcntl.lockf(self._lock_fd, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, _USERS)
        except BaseException:
            os.close(self._lock_fd)
            raise

    def _open(self, is_alone: bool) -> None:
        data = self.folder / DATA_FILE
        with _translated(self.folder):
            is_new = not data.exists() or data.stat().st_size == 0
            if not is_new:
                self._check_size(data)
            if is_new and not is_alone:  # the first opener makes it before another one can come
                raise StoreError(
                    MoveFailure.UNAVAILABLE,
                    f"{data} was deleted while other processes have it open: end them, or use "
                    "another folder",
                )
            if not is_new and is_alone:
                self._check_structure()
            self._env = lmdb.open(
                str(self.folder),
                map_size=self.capacity_bytes,
                metasync=self.sync == "always",
                sync=True,
                writemap=False,
                mode=0o700,
                max_dbs=len(TABLES),
                max_readers=1024,
                meminit=False,
                lib_version=0,
            )
            self.capacity_bytes = self.capacity_bytes or self._env.info()["map_size"]
            self.page_bytes: int = self._env.stat()["psize"]
            try:
                self._file = DataFile(data, self.page_bytes)
                self._env.reader_check()
                self._open_tables(is_new)
            except BaseException:
                self._close_data()
                raise

    def _check_size(self, data: Path) -> None:
        size = data.stat().st_size
        if 0 < self.capacity_bytes < size:
            raise StoreError(
                MoveFailure.FULL,
                f"{self.folder} has {size:,} bytes, more than its budget of "
                f"{self.capacity_bytes:,}: raise kv_store_bytes, or shrink it with moestro kv gc",
            )

    def _check_structure(self) -> None:
        """Refuse what LMDB would crash on. Whoever comes second need not look again."""
        try:
            with cache_left_alone(self.folder / DATA_FILE):
                problems = structure.verify(str(self.folder))
        except structure.VerifyError as error:
            problems = [str(error)]
        if problems:
            raise StoreError(
                MoveFailure.CORRUPT,
                f"{self.folder} is damaged or no LMDB 0.9 environment ({problems[0]}; "
                f"{len(problems)} findings): delete the folder, or use another one",
            )

    def _open_tables(self, is_new: bool) -> None:
        self.tables: dict[bytes, Any] = {}
        if not is_new:
            with self._env.begin() as txn:
                names = {bytes(key) for key, _ in txn.cursor()}
            if names and names != set(TABLES):
                raise StoreError(
                    MoveFailure.ERROR,
                    f"{self.folder} holds an LMDB environment that is no KV store of Moestro: "
                    "use another folder",
                )
        with self._env.begin(write=True) as txn:
            for name in TABLES:
                self.tables[name] = self._env.open_db(name, txn=txn)
            written = txn.get(b"format", db=self.tables[b"meta"])
            if written is None:
                txn.put(b"format", FORMAT, db=self.tables[b"meta"])
            elif written != FORMAT:
                raise StoreError(
                    MoveFailure.ERROR,
                    f"{self.folder} was written in format {written!r}, and this version reads "
                    f"{FORMAT!r}: delete the folder, or use another one",
                )

    @contextlib.contextmanager
    def reading(self, deadline: Deadline) -> Iterator[Any]:
        """A snapshot; values are views of the map that end with it."""
        with self._held(self._readers, deadline), _translated(self.folder):
            try:
                txn = self._env.begin(buffers=True)
            except lmdb.MapResizedError:  # another process has a larger budget
                with self._held(self._writers, deadline):
                    self._env.set_mapsize(0)
                txn = self._env.begin(buffers=True)
            with txn:
                yield txn

    @contextlib.contextmanager
    def writing(self, deadline: Deadline) -> Iterator[Any]:
        """A transaction: all of it, or after an exception nothing. What it shows are views, of use
        only until its next change."""
        with (
            self._held(self._writers, deadline),
            self._writer_lock(deadline),
            _translated(self.folder),
        ):
            try:
                txn = self._env.begin(write=True, buffers=True)
            except lmdb.MapResizedError:
                with self._held(self._readers, deadline):
                    self._env.set_mapsize(0)
                txn = self._env.begin(write=True, buffers=True)
            with txn:
                yield txn

    @property
    def file(self) -> DataFile:
        """For large values, within `reading` or `writing`."""
        assert self._file is not None
        return self._file

    @contextlib.contextmanager
    def _held(self, lock: threading.Lock, deadline: Deadline) -> Iterator[None]:
        if self._pid != os.getpid():
            raise StoreError(
                MoveFailure.UNAVAILABLE,
                f"{self.folder} was opened before this process was forked: open it again",
            )
        if self._is_gone:
            raise StoreError(
                MoveFailure.UNAVAILABLE,
                f"{self.folder / DATA_FILE} was deleted or replaced while in use: nothing is kept "
                "there until the engine is started again",
            )
        if not lock.acquire(timeout=deadline.remaining_s):
            raise StoreError(MoveFailure.TIMEOUT, f"{self.folder} is busy in this process")
        try:
            yield
        finally:
            lock.release()

    @contextlib.contextmanager
    def _writer_lock(self, deadline: Deadline) -> Iterator[None]:
        """Asks again and again: the system offers no wait with a limit that a thread could use."""
        pause_s = _FIRST_RETRY_S
        while not self._try_lock(_WRITER):
            if not deadline.remaining_s:
                raise StoreError(
                    MoveFailure.TIMEOUT, f"another process is writing to {self.folder}"
                )
            time.sleep(min(pause_s, deadline.remaining_s))
            pause_s = min(2 * pause_s, _LONGEST_RETRY_S)
        try:
            yield
        finally:
            fcntl.lockf(self._lock_fd, fcntl.LOCK_UN, 1, _WRITER)

    def _try_lock(self, what: int) -> bool:
        try:
            fcntl.lockf(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, what)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            raise StoreError(*_of_system(error, self.folder)) from error
        return True

    def flush(self) -> None:
        """Make what was committed last durable too."""
        with _translated(self.folder):
            self._env.sync(True)

    def clear_dead_readers(self) -> None:
        """Free the snapshots of processes that are gone: they would keep deleted pages in use."""
        with _translated(self.folder):
            self._env.reader_check()

    def check_in_place(self) -> None:
        """Use it no more once its file is no longer the one in the folder: pages would go, unseen,
        into a file without a name, and its lock file would be shared with the next one's."""
        with _translated(self.folder):
            ours = self.file.identity()
            try:
                found = os.stat(self.folder / DATA_FILE)
                self._is_gone = (found.st_dev, found.st_ino) != ours
            except FileNotFoundError:
                self._is_gone = True

    def info(self) -> dict[str, int]:
        """file_bytes, map_bytes."""
        with _translated(self.folder):
            info = self._env.info()
        size = (info["last_pgno"] + 1) * self.page_bytes
        return {"file_bytes": size, "map_bytes": info["map_size"]}

    def compact(self, deadline: Deadline) -> bool:
        """Rewrite the file without its free pages; False when another process has it open."""
        with (
            self._held(self._readers, deadline),
            self._held(self._writers, deadline),
            self._writer_lock(deadline),
            _translated(self.folder),
        ):
            if not self._try_lock(_USERS):
                return False
            fresh = self.folder / "compact"
            for old in fresh.glob("*"):
                old.unlink()
            fresh.mkdir(exist_ok=True)
            self._env.copy(str(fresh), compact=True)
            self._close_data()
            os.replace(fresh / DATA_FILE, self.folder / DATA_FILE)
            fresh.rmdir()
            self._open(is_alone=True)
            fcntl.lockf(self._lock_fd, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, _USERS)
        return True

    def _close_data(self) -> None:
        with contextlib.suppress(lmdb.Error):
            self._env.close()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _close(self) -> None:
        self._close_data()
        os.close(self._lock_fd)


_open_environments: dict[tuple[int, int], tuple[LmdbEnvironment, int]] = {}
_opening = threading.Lock()


def shared(folder: Path, capacity_bytes: int, sync: str, deadline: Deadline) -> LmdbEnvironment:
    """This process's environment of that folder, opened if nobody has it; its first opener's
    budget and syncs hold. Raises StoreError."""
    if not _opening.acquire(timeout=deadline.remaining_s):
        raise StoreError(MoveFailure.TIMEOUT, f"{folder} is still being opened in this process")
    try:
        key = _identity(folder)
        if key in _open_environments:
            env, users = _open_environments[key]
        else:
            env, users = LmdbEnvironment(folder, capacity_bytes, sync, deadline), 0
        _open_environments[_identity(folder)] = (env, users + 1)
        return env
    finally:
        _opening.release()


def release(env: LmdbEnvironment) -> None:
    """Close it when nobody else in this process uses it."""
    with _opening:
        for key, (known, users) in tuple(_open_environments.items()):
            if known is env:
                del _open_environments[key]
                if users > 1:
                    _open_environments[key] = (env, users - 1)
                else:
                    env._close()


def _let_go_in_child() -> None:
    """A forked child has none of its parent's environments, and may open its own."""
    global _opening  # another thread of the parent may have held it
    _opening = threading.Lock()
    for env, _ in _open_environments.values():
        env._close()
    _open_environments.clear()


os.register_at_fork(after_in_child=_let_go_in_child)


def _identity(folder: Path) -> tuple[int, int]:
    try:
        found = os.stat(folder)
    except OSError:
        return (-1, -1)  # not there yet
    return (found.st_dev, found.st_ino)


@contextlib.contextmanager
def _translated(folder: Path) -> Iterator[None]:
    """LMDB's and the system's errors as StoreError."""
    try:
        yield
    except lmdb.MapFullError as error:
        raise StoreError(MoveFailure.FULL, f"{folder} has used its budget up") from error
    except lmdb.Error as error:
        code = getattr(error, "code", 0)
        if 0 < code < 4096:
            raise StoreError(*_of_system(OSError(code, os.strerror(code)), folder)) from error
        raise StoreError(MoveFailure.ERROR, f"{folder}: {error}") from error
    except OSError as error:
        raise StoreError(*_of_system(error, folder)) from error


def _of_system(error: OSError, folder: Path) -> tuple[MoveFailure, str]:
    text = f"{folder}: {error.strerror or error}"
    if error.errno in _FULL:
        return MoveFailure.FULL, f"{text}: the disk is full, a quota is used up, or it is failing"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return MoveFailure.UNAVAILABLE, f"{text}: a store must be writable"
    return MoveFailure.UNAVAILABLE, text
