"""A control loop with a real store, over a fake cluster."""

import pytest

from doubles.control_bench import ControlBench
from shoal_service.store.store import Store


@pytest.fixture
def bench(store: Store) -> ControlBench:
    return ControlBench(store)
