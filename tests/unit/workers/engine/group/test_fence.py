from __future__ import annotations

from shoal_workers.engine.group.fence import Fence


def test_a_fence_only_rises() -> None:
    fence = Fence()
    assert not fence.is_fenced(0)
    fence.raise_to(3)
    fence.raise_to(1)
    assert [fence.is_fenced(g) for g in (0, 3, 4)] == [True, True, False]


def test_a_yield_does_not_reach_the_next_generation() -> None:
    fence = Fence()
    fence.request_yield(3, durable=False)
    assert fence.is_yield_requested(3)
    assert not fence.is_yield_requested(4)
    assert not fence.is_fenced(3)


def test_a_yield_is_durable_once_any_request_is() -> None:
    fence = Fence()
    fence.request_yield(3, durable=False)
    assert not fence.is_durable_requested(3)
    fence.request_yield(3, durable=True)
    fence.request_yield(3, durable=False)
    assert fence.is_durable_requested(3)
    assert not fence.is_durable_requested(4)
