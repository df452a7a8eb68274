"""The supervisor makes a sample of its workers' measurements every ten seconds."""

from shoal_service.supervisor.reporting.reporter import SystemSampler
from shoal_workers.contract.messages import WorkerUse


def use(at: float, cores: float) -> WorkerUse:
    return WorkerUse(at=at, cpu_cores=cores)


def test_a_measurement_that_polls_repeat_counts_once() -> None:
    sampler = SystemSampler()
    for measured in (use(1.0, 1.0), use(1.0, 1.0), use(6.0, 3.0)):
        sampler.add(7, 0, measured, 1)
    found = sampler.take(1, now=9.0, now_mono=100.0)
    assert found is not None and found.values["cpu_cores"] == (2.0,) and (found.at, found.generation) == (9.0, 1)


def test_the_next_sample_comes_after_its_interval_and_has_new_measurements_only() -> None:
    sampler = SystemSampler()
    sampler.add(7, 0, use(1.0, 1.0), 1)
    assert sampler.take(1, now=9.0, now_mono=100.0) is not None
    sampler.add(7, 0, use(6.0, 3.0), 1)
    assert sampler.take(1, now=18.0, now_mono=109.9) is None
    found = sampler.take(1, now=19.0, now_mono=110.0)
    assert found is not None and found.values["cpu_cores"] == (3.0,)
    assert sampler.take(1, now=40.0, now_mono=131.0) is None, "nothing was measured"


def test_a_new_generation_begins_with_nothing_and_workers_without_a_rank_do_not_count() -> None:
    sampler = SystemSampler()
    sampler.add(7, 0, use(1.0, 1.0), 1)
    sampler.add(8, 0, use(2.0, 5.0), 2)
    sampler.add(9, None, use(2.0, 9.0), 2)
    found = sampler.take(2, now=9.0, now_mono=100.0)
    assert found is not None and found.generation == 2 and found.values["cpu_cores"] == (5.0, None)
