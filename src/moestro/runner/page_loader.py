"""PageLoader: fills device pages from host slots layer by layer, ahead of the model."""

import logging
import queue
import threading
import time
import weakref
from collections.abc import Sequence
from typing import overload

from moestro.core.page_moves import PageLoad
from moestro.ops.kv_pages import KVPages
from moestro.runner.host_pool import HostPool

logger = logging.getLogger(__name__)


class LayersInLoading(Sequence[KVPages]):
    """A KV pool's layers, each handed out once its loaded pages are in place.

    num_bytes: that it loads. seconds: from the first copy to the last, once it is done.
    """

    def __init__(
        self, layers: Sequence[KVPages], loads: Sequence[PageLoad], host: HostPool
    ) -> None:
        self._layers = layers
        self._loads = loads
        self._host = host
        self._num_ready = 0
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self.num_bytes = sum(len(load.slots) for load in loads) * host.page_bytes
        self.seconds = 0.0

    @overload
    def __getitem__(self, index: int) -> KVPages: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[KVPages]: ...
    def __getitem__(self, index: int | slice) -> KVPages | Sequence[KVPages]:
        """Waits. Raises what went wrong in the loader."""
        if isinstance(index, slice):
            self.wait()
            return self._layers[index]
        number = range(len(self._layers))[index]
        self._wait_for(number + 1)
        return self._layers[number]

    def __len__(self) -> int:
        return len(self._layers)

    def wait(self) -> None:
        """Until all is in place. Raises what went wrong in the loader."""
        self._wait_for(len(self._layers))

    def run(self) -> None:
        """Copy. For the loader's thread."""
        begin = time.perf_counter()
        try:
            for layer in range(len(self._layers)):
                for load in self._loads:
                    self._host.load(layer, load.slots, load.pages)
                self.seconds = time.perf_counter() - begin
                self._tell(layer + 1, None)
        except BaseException as error:
            logger.exception("loading KV pages from the host failed")
            self._tell(self._num_ready, error)

    def _tell(self, num_ready: int, error: BaseException | None) -> None:
        with self._changed:
            self._num_ready, self._error = num_ready, error
            self._changed.notify_all()

    def _wait_for(self, count: int) -> None:
        if self._num_ready >= count:
            return
        with self._changed:
            self._changed.wait_for(lambda: self._num_ready >= count or self._error is not None)
            if self._num_ready < count:
                raise RuntimeError(f"KV pages were not loaded: {self._error}") from self._error


class PageLoader:
    """A thread that loads for one step at a time. It ends with close, or when this is dropped."""

    def __init__(self, layers: Sequence[KVPages], host: HostPool) -> None:
        self._layers = layers
        self._host = host
        self._jobs: queue.SimpleQueue[LayersInLoading | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_work, args=(self._jobs,), name="moestro-kv-load", daemon=True
        )
        self._thread.start()
        self._stop = weakref.finalize(self, self._jobs.put, None)

    def start(self, loads: Sequence[PageLoad]) -> LayersInLoading:
        """Begin to load; hand the result to the model in place of the pool's layers."""
        job = LayersInLoading(self._layers, loads, self._host)
        self._jobs.put(job)
        return job

    def close(self) -> None:
        """After what is being loaded. Idempotent."""
        self._stop()
        self._thread.join()


def _work(jobs: "queue.SimpleQueue[LayersInLoading | None]") -> None:
    while True:
        job = jobs.get()
        if job is None:
            return
        job.run()
        del job  # a waiting thread must not keep a step's pages alive
