"""examples/trace.csv is what its generator makes, and it can be read."""

import trace_generator
from shoal_service.simulator.traces import read_trace


def test_the_committed_example_is_up_to_date() -> None:
    made = trace_generator.generate(trace_generator.NUM_JOBS, trace_generator.SEED)
    assert made == trace_generator.EXAMPLE.read_text(encoding="utf-8"), "run `make docs`"


def test_the_example_has_what_a_trace_can_have() -> None:
    jobs = read_trace(trace_generator.EXAMPLE).jobs
    assert len(jobs) == trace_generator.NUM_JOBS
    assert {job.project for job in jobs} == {"vision", "speech"}
    assert {job.priority for job in jobs} == {0, 50}
    assert {job.min_workers for job in jobs} == {1, 2} and {job.max_workers for job in jobs} == {4, 8}
    assert all(job.curve.rate(job.max_workers) > job.curve.rate(1) for job in jobs)


def test_another_seed_makes_another_trace() -> None:
    assert trace_generator.generate(3, 1) != trace_generator.generate(3, 2)
