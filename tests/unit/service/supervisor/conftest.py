"""A supervisor with fakes all around it."""

import pytest

from doubles.supervisor_bench import SupervisorBench


@pytest.fixture
def bench() -> SupervisorBench:
    return SupervisorBench()
