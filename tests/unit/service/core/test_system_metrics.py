"""Samples of what ranks measure."""

import pytest

from shoal_service.core.system_metrics import (
    LEVELS,
    MAX_BUCKETS,
    VALUES,
    SystemMetric,
    level_for,
    pace_s,
    sample_of,
)
from shoal_workers.contract.messages import StepPart, WorkerUse

WAITS = {StepPart.COMMUNICATION: 0.75, StepPart.FORWARD: 0.25}


def test_every_metric_has_a_value_and_every_part_of_a_step_is_a_metric() -> None:
    assert set(VALUES) == set(SystemMetric)
    assert {part.value for part in StepPart} <= {metric.value for metric in SystemMetric}


def test_a_sample_is_the_mean_of_each_ranks_measurements() -> None:
    uses = {
        0: [WorkerUse(at=1.0, cpu_cores=1.0, phases=WAITS), WorkerUse(at=2.0, cpu_cores=2.0)],
        2: [WorkerUse(at=1.0, cpu_cores=None, resident_bytes=1 << 30)],
    }
    found = sample_of(uses, num_ranks=3, generation=4, at=9.0)
    assert (found.at, found.generation) == (9.0, 4)
    assert found.values["cpu_cores"] == (1.5, None, None)
    assert found.values["busy"] == (0.25, None, None) and found.values["communication"] == (0.75, None, None)
    assert found.values["memory_bytes"] == (None, None, pytest.approx(1 << 30, rel=1e-4))
    assert "gpu_watts" not in found.values, "no rank has it"


def test_a_rank_on_a_gpu_has_no_busy_share_of_its_thread() -> None:
    use = WorkerUse(at=1.0, phases=WAITS, gpu_bytes=100, gpu_free_bytes=40, gpu_busy=0.5, gpu_watts=300.0)
    found = sample_of({0: [use]}, num_ranks=1, generation=1, at=1.0).values
    assert "busy" not in found and found["gpu_memory_bytes"] == (60,) and found["gpu_watts"] == (300.0,)


def test_the_finest_level_that_has_the_whole_range_is_read() -> None:
    assert level_for(0.0, 10.0 * (MAX_BUCKETS - 1)) == 10.0
    assert level_for(0.0, 10.0 * MAX_BUCKETS) == 40.0
    assert level_for(0.0, 1e12) == LEVELS[-1]


def test_more_ranks_are_sampled_less_often() -> None:
    assert (pace_s(1), pace_s(128), pace_s(1024)) == (10.0, 10.0, 80.0)
