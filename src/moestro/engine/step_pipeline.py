"""StepPipeline: where schedules are executed in order, in the engine's thread or beside it."""

import queue
import threading
import weakref
from collections import deque
from typing import Protocol

from moestro.core.step import Runner, Schedule, StepOutput


class StepPipeline(Protocol):
    """Takes schedules and gives their outputs back in the same order."""

    def submit(self, schedule: Schedule) -> None:
        """Have `schedule` executed after those before it."""

    def collect(self) -> StepOutput:
        """The output of the oldest schedule not collected yet, once it is there. Raises what the
        runner raised for it, or for one before it."""

    def close(self) -> None:
        """Return once nothing is executed any more; what has not begun is dropped. Idempotent."""


class InlineSteps:
    """Executes a schedule where it is submitted."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._outputs: deque[StepOutput] = deque()

    def submit(self, schedule: Schedule) -> None:
        """See StepPipeline; raises what the runner raises."""
        self._outputs.append(self._runner.execute(schedule))

    def collect(self) -> StepOutput:
        """See StepPipeline."""
        return self._outputs.popleft()

    def close(self) -> None:
        """See StepPipeline."""
        self._outputs.clear()


class ThreadedSteps:
    """Executes schedules one after the other on a thread of its own.

    The thread goes from one step into the next without waiting for anybody: its wake-up and the
    engine's work between two steps cost the device nothing. It holds the GIL only between
    kernels. It begins with the first schedule, and again in a forked child, which has none of its
    parent's threads; it ends with close, with the last reference to this, and with the process.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._is_closed = False
        self._workers: list[_Worker] = []  # one at most, and none before the first schedule
        # At exit too: a daemon thread inside a kernel while the interpreter goes would crash. Made
        # here, so that at exit those run first who were made later and close what they use.
        self._stop = weakref.finalize(self, _stop_all, self._workers)

    def submit(self, schedule: Schedule) -> None:
        """See StepPipeline. Raises RuntimeError after close."""
        if not (self._workers and self._workers[0].thread.is_alive()):
            self._start()
        self._workers[0].schedules.put(schedule)

    def collect(self) -> StepOutput:
        """See StepPipeline."""
        if not self._workers:
            raise RuntimeError("no schedule has been submitted")
        results = self._workers[0].results
        result = results.get()
        if isinstance(result, StepOutput):
            return result
        if isinstance(result, _StoppedError):
            results.put(result)  # for whoever asks again
        raise result

    def close(self) -> None:
        """See StepPipeline."""
        self._is_closed = True
        self._stop()

    def _start(self) -> None:
        if self._is_closed:
            raise RuntimeError("the pipeline is closed")
        self._workers[:] = [_Worker(self._runner)]


class _StoppedError(RuntimeError):
    """What is collected of a pipeline that has been closed."""


def _stop_all(workers: "list[_Worker]") -> None:
    for worker in workers:
        worker.stop()


class _Worker:
    """The thread and its queues. It knows nothing of the ThreadedSteps, so that can be dropped."""

    def __init__(self, runner: Runner) -> None:
        self.schedules: queue.SimpleQueue[Schedule | None] = queue.SimpleQueue()
        self.results: queue.SimpleQueue[StepOutput | BaseException] = queue.SimpleQueue()
        self._stopping = False
        self.thread = threading.Thread(
            target=self._run, args=(runner,), name="moestro-steps", daemon=True
        )
        self.thread.start()

    def stop(self) -> None:
        """Return once the step that is executed now is done; the collector may call it anywhere."""
        self._stopping = True
        self.schedules.put(None)
        if self.thread is not threading.current_thread():
            self.thread.join()

    def _run(self, runner: Runner) -> None:
        failure: BaseException | None = None
        while (schedule := self.schedules.get()) is not None and not self._stopping:
            try:
                if failure is None:
                    result: StepOutput | BaseException = runner.execute(schedule)
                else:
                    result = failure  # what comes after a step that failed can't be trusted
            except BaseException as error:
                result = failure = error
            self.results.put(result)
            del schedule, result  # a waiting thread must not keep what a step holds alive
        self.results.put(_StoppedError("the pipeline is closed"))
