"""Rules of the scheduler, one by one."""

from tests.fakes.scripted_runner import Script
from tests.scheduler.loop import Loop, expected, make_request


def assert_as_expected(loop: Loop, requests: list) -> None:
    for request in requests:
        for index in range(request.params.n):
            want = expected(request, index, loop.runner.script, loop.max_len)
            got = loop.results[request.request_id, index]
            assert (got.token_ids, got.finish_reason, got.stop_reason) == (
                want.token_ids,
                want.finish_reason,
                want.stop_reason,
            )


def test_one_request_runs_to_max_tokens() -> None:
    loop = Loop()
    request = make_request("a", [1, 2, 3], max_tokens=5)
    loop.add(request)
    assert loop.run() == 5
    assert_as_expected(loop, [request])
    assert loop.scheduler.stats().generation_tokens == 5


def test_everything_at_once_in_a_tiny_pool() -> None:
    loop = Loop(num_pages=8, max_num_batched_tokens=3, script=Script(vocab_size=20))
    requests = [
        make_request(
            f"r{i}", [5] * 5 + [i] * (i % 7), seed=i, n=1 + i % 3, max_tokens=15, eos_token_ids=(0,)
        )
        for i in range(12)
    ]
    loop.add(*requests)
    loop.run()
    assert_as_expected(loop, requests)
    stats = loop.scheduler.stats()
    assert stats.num_preemptions > 0
    assert stats.prefix_hits_tokens > 0
    assert stats.num_pages_used == 0
