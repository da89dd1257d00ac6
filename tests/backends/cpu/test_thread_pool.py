"""The kernels' threads: any number, after fork, from several callers, asleep when idle."""

import os
import sys
import threading
import time
import warnings
from collections.abc import Iterator

import pytest
import torch
from tests.backends.cpu.levels import LEVELS, draw, same_bits

from moestro import ops
from moestro.backends.cpu import library
from moestro.backends.cpu.device import CpuDevice

pytestmark = pytest.mark.skipif(not LEVELS, reason="no kernel library was built here")


@pytest.fixture(autouse=True)
def _restore_threads() -> Iterator[None]:
    threads = library.native().num_threads()
    yield
    library.native().set_num_threads(threads)


def test_any_number_of_threads_gives_the_same_bits() -> None:
    x, weight = draw(40, 300), draw(500, 300)
    library.native().set_num_threads(1)
    expected = ops.linear(x, weight)
    for threads in (2, 3, 8, 1, 5):
        library.native().oversubscribe(threads)
        assert library.native().num_threads() == threads
        for _ in range(20):
            assert same_bits(ops.linear(x, weight), expected)


def test_a_forked_child_computes_with_its_own_threads() -> None:
    library.native().set_num_threads(2)
    x, weight = draw(40, 300), draw(500, 300)
    expected = ops.linear(x, weight)
    _check_in_a_child(x, weight, expected)
    assert same_bits(ops.linear(x, weight), expected)


def _check_in_a_child(x: torch.Tensor, weight: torch.Tensor, expected: torch.Tensor) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork with threads: just that is meant
        child = os.fork()
    if child == 0:
        os._exit(0 if same_bits(ops.linear(x, weight), expected) else 1)
    deadline = time.monotonic() + 60
    while (done := os.waitpid(child, os.WNOHANG)) == (0, 0):
        assert time.monotonic() < deadline, "the child hangs"
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(done[1]) == 0


def test_callers_at_the_same_time_do_not_disturb_each_other() -> None:
    library.native().set_num_threads(2)
    inputs = [(draw(30, 200), draw(300, 200)) for _ in range(4)]
    expected = [ops.linear(x, w) for x, w in inputs]
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(100):
            if not same_bits(ops.linear(*inputs[i]), expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_idle_threads_sleep() -> None:
    library.native().set_num_threads(4)
    ops.linear(draw(40, 300), draw(500, 300))
    time.sleep(0.2)  # past the short time they keep looking for work
    before = _seconds_of_other_threads()
    time.sleep(1.0)
    assert _seconds_of_other_threads() - before < 0.01


def _seconds_of_other_threads() -> float:
    """CPU time of all threads of this process but the calling one."""
    me = time.clock_gettime(time.CLOCK_THREAD_CPUTIME_ID)
    return time.clock_gettime(time.CLOCK_PROCESS_CPUTIME_ID) - me


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_more_threads_run_than_processors_unless_asked() -> None:
    threads = 4 * (os.cpu_count() or 1)
    x, weight = draw(40, 300), draw(500, 300)
    library.native().set_num_threads(1)
    before, expected = _num_tasks(), ops.linear(x, weight)
    library.native().set_num_threads(threads)
    assert library.native().num_threads() == threads
    assert same_bits(ops.linear(x, weight), expected)
    assert _num_tasks() <= before + len(os.sched_getaffinity(0)) - 1
    library.native().oversubscribe(threads)
    assert same_bits(ops.linear(x, weight), expected)
    assert _num_tasks() >= threads
    for _ in range(200):
        assert same_bits(ops.linear(x, weight), expected)
    library.native().set_num_threads(1)
    assert _num_tasks() == before


def _num_tasks() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.parametrize("count", [0, -1, -(2**31), 1025, 2**31 - 1])
def test_a_wrong_number_of_threads_is_refused(count: int) -> None:
    library.native().set_num_threads(2)
    with pytest.raises(ValueError, match=str(count)):
        CpuDevice().set_num_threads(count)
    assert library.native().num_threads() == 2


def test_torch_computes_between_the_kernels() -> None:
    library.native().set_num_threads(2)
    x, weight = draw(200, 300), draw(500, 300)
    expected, torchs = ops.linear(x, weight), x @ weight.T
    for _ in range(100):
        assert same_bits(ops.linear(x, weight), expected)
        assert same_bits(x @ weight.T, torchs)


def test_a_child_forked_while_a_job_runs_computes() -> None:
    library.native().set_num_threads(2)
    x, weight = draw(40, 300), draw(500, 300)
    expected = ops.linear(x, weight)
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            ops.linear(x, weight)

    worker = threading.Thread(target=work)
    worker.start()
    try:
        for _ in range(10):
            _check_in_a_child(x, weight, expected)
    finally:
        stop.set()
        worker.join()


def test_scratch_is_given_back_and_made_again() -> None:
    routing = ops.Routing(torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, 1))
    weights = ops.ExpertWeights(draw(1, 8, 16), draw(1, 16, 4))
    x = draw(3, 16)
    expected = ops.moe_experts(x, routing, weights, True)
    library.native().release_scratch()
    assert same_bits(ops.moe_experts(x, routing, weights, True), expected)
