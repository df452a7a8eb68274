from __future__ import annotations

import pytest

from shoal_workers.engine.generation_ends import Fenced
from shoal_workers.engine.group.fence import Fence


def test_a_fence_only_rises() -> None:
    fence = Fence()
    assert not fence.of(0).is_raised
    fence.raise_to(3)
    fence.raise_to(1)
    assert [fence.of(g).is_raised for g in (0, 3, 4)] == [True, True, False]


def test_a_yield_is_durable_once_any_request_is() -> None:
    fence = Fence()
    fence.request_yield(3, durable=False)
    assert not fence.of(3).is_durable_requested
    fence.request_yield(3, durable=True)
    fence.request_yield(3, durable=False)
    assert fence.of(3).is_durable_requested
    assert not fence.of(4).is_durable_requested


def test_a_generation_sees_orders_for_itself_only() -> None:
    fence = Fence()
    own, next_one = fence.of(3), fence.of(4)
    own.check()
    fence.request_yield(3, durable=True)
    assert (own.is_yield_requested, own.is_durable_requested) == (True, True)
    assert (next_one.is_yield_requested, next_one.is_durable_requested) == (False, False)
    fence.raise_to(3)
    assert own.is_raised and not next_one.is_raised
    with pytest.raises(Fenced, match="generation 3 is fenced"):
        own.check()
    next_one.check()
