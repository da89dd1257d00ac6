"""The kernels' threads: any number, after fork, from several callers, asleep when idle."""

import os
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from tests.backends.cpu.levels import LEVELS, draw, same_bits

from moestro import ops
from moestro.backends.cpu import library

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
        library.native().set_num_threads(threads)
        assert library.native().num_threads() == threads
        for _ in range(20):
            assert same_bits(ops.linear(x, weight), expected)


def test_a_forked_child_computes_with_its_own_threads() -> None:
    library.native().set_num_threads(2)
    x, weight = draw(40, 300), draw(500, 300)
    expected = ops.linear(x, weight)
    child = os.fork()
    if child == 0:
        os._exit(0 if same_bits(ops.linear(x, weight), expected) else 1)
    deadline = time.monotonic() + 60
    while (done := os.waitpid(child, os.WNOHANG)) == (0, 0):
        assert time.monotonic() < deadline, "the child hangs"
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(done[1]) == 0
    assert same_bits(ops.linear(x, weight), expected)


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


def test_idle_threads_use_no_cpu() -> None:
    library.native().set_num_threads(4)
    ops.linear(draw(40, 300), draw(500, 300))
    time.sleep(0.05)  # past the short time they keep looking for work
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.25


def test_scratch_is_given_back_and_made_again() -> None:
    routing = ops.Routing(torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, 1))
    weights = ops.ExpertWeights(draw(1, 8, 16), draw(1, 16, 4))
    x = draw(3, 16)
    expected = ops.moe_experts(x, routing, weights, True)
    library.native().release_scratch()
    assert same_bits(ops.moe_experts(x, routing, weights, True), expected)
