"""Loops of a user's own: killed, grown and shrunk, their losses are those of the undisturbed run in one process."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kit.processes.warm import warm_python
from kit.worlds import plain_loop
from shoal_workers.contract.layout import replicated
from shoal_workers.contract.messages import ExitKind
from shoal_workers.contract.worker_reports import GroupFormed

ROOT = Path(__file__).parents[3]
LOOPS = ROOT / "tests" / "kit" / "loops"
STEPS = 8


def file_of(name: str) -> Path:
    return ROOT / "examples" / "gallery" / "gan" / "train.py" if name == "gan" else LOOPS / f"{name}.py"


def arguments_of(name: str, arguments: tuple[str, ...]) -> tuple[str, ...]:
    return (str(STEPS),) if name == "gan" else arguments


def spec_of(name: str = "digits", *arguments: str) -> dict[str, Any]:
    return {
        "task": None,
        "loop": {"file": str(file_of(name).relative_to(ROOT)), "args": arguments_of(name, arguments)},
        "elasticity": {"max_workers": plain_loop.MOST_WORKERS},
        "snapshot": {"budget": 1.0},
    }


def undisturbed(name: str = "digits", *arguments: str) -> dict[int, float]:
    """The losses in plain torch, by step."""
    return plain_loop.undisturbed(file_of(name), *arguments_of(name, arguments))[0]


@pytest.mark.parametrize(("name", "world_size"), [("digits", 1), ("digits", 3), ("gan", 3), ("contrastive", 2)])
def test_a_loop_trains_at_any_size_as_plain_torch_does(make_job: Any, name: str, world_size: int) -> None:
    job = make_job(memory=True, **spec_of(name))
    workers = job.workers(world_size)
    ends = job.run(workers, layout=replicated(world_size))
    assert [(e.kind, e.step, e.is_durable) for e in ends] == [(ExitKind.FINISHED, STEPS, True)] * world_size, ends
    assert job.losses(workers) == pytest.approx(undisturbed(name), abs=3e-7)


def early(job: Any, workers: list[Any]) -> int:
    """Buckets that rank 0 had sent during backward passes when it completed its last step."""
    return int(job.reports(workers[0])[-1].metrics["early"])


@pytest.mark.parametrize(
    ("how", "world_size"),
    [
        ("usual", 3),
        ("unused", 3),
        ("twice", 3),
        ("varied", 3),
        ("touched", 3),
        ("touched_data", 2),
        ("hooked", 2),
        ("switched", 3),
        ("gathered", 3),
        ("usual", 2),
        pytest.param("unused", 2, marks=pytest.mark.matrix),
        pytest.param("switched", 2, marks=pytest.mark.matrix),
        pytest.param("gathered", 2, marks=pytest.mark.matrix),
        pytest.param("unused", 1, marks=pytest.mark.matrix),
        pytest.param("switched", 1, marks=pytest.mark.matrix),
    ],
)
def test_sums_that_were_begun_early_are_those_of_plain_torch_whatever_the_loop_does(
    make_job: Any, how: str, world_size: int
) -> None:
    job = make_job(memory=True, **spec_of("wide", how))
    workers = job.workers(world_size)
    ends = job.run(workers, layout=replicated(world_size))
    assert [e.kind for e in ends] == [ExitKind.FINISHED] * world_size, ends
    assert job.losses(workers) == pytest.approx(undisturbed("wide", how), abs=3e-7)
    assert world_size == 1 or early(job, workers) > 0


def test_a_large_model_whose_loop_begins_to_write_to_grad_data_late_is_refused(make_job: Any) -> None:
    """With more gradients than are compared in each update."""
    job = make_job(**spec_of("wide", "touched_data", "1200"))
    ends = job.run(job.workers(2), layout=replicated(2))
    assert [end.kind for end in ends] == [ExitKind.USER_ERROR] * 2, ends
    assert all("the loop writes to `grad.data`" in end.error.message for end in ends), ends


def test_a_rank_that_dies_while_sums_are_under_way_costs_no_completed_step(make_job: Any) -> None:
    job = make_job(memory=True, **spec_of("wide", "killed") | {"snapshot": {"budget": 1e-6}})
    workers = job.workers(3)
    victim, survivors = workers[1], [workers[0], workers[2]]
    job.start(workers, layout=replicated(3))
    assert victim.died()
    source = job.in_memory(job.interrupt(survivors), survivors)
    assert source.step == 6
    assert early(job, workers) > 0
    ends = job.run(survivors, layout=replicated(2), restore_snapshot=source)
    assert [e.kind for e in ends] == [ExitKind.FINISHED] * 2, ends
    assert job.losses(survivors) == pytest.approx(undisturbed("wide", "killed"), abs=3e-7)


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        *(("digits", phase) for phase in ("forward", "backward", "optimizer", "snapshot")),
        ("gan", "optimizer"),
        ("contrastive", "backward"),
    ],
)
def test_a_killed_rank_costs_at_most_one_step_and_changes_no_loss(make_job: Any, name: str, phase: str) -> None:
    job = make_job(memory=True, **spec_of(name))
    workers = job.workers(3)
    victim, survivors = workers[1], [workers[0], workers[2]]
    victim.strike(phase, 5, "kill")
    job.start(workers, layout=replicated(3))
    assert victim.died()
    exits = job.interrupt(survivors)
    assert {e.kind for e in exits} <= {ExitKind.INTERRUPTED, ExitKind.COLLECTIVE_FAILED}
    source = job.in_memory(exits, survivors)
    assert source.step >= 4
    ends = job.run(survivors, layout=replicated(2), restore_snapshot=source)
    assert [e.kind for e in ends] == [ExitKind.FINISHED] * 2, ends
    assert job.reported(survivors, GroupFormed)[-1].start_step == source.step
    assert job.losses(survivors) == pytest.approx(undisturbed(name), abs=3e-7)


@pytest.mark.parametrize(("phase", "name"), [("backward", "digits"), ("forward", "gan")])
def test_no_completed_step_is_repeated_although_copies_are_rare(make_job: Any, phase: str, name: str) -> None:
    """A survivor keeps the state that it has when it leaves the broken group."""
    job = make_job(memory=True, **spec_of(name) | {"snapshot": {"budget": 1e-6}})
    workers = job.workers(3)
    victim, survivors = workers[1], [workers[0], workers[2]]
    source = job.lose(workers, victim, phase, 7, layout=replicated(3))
    ends = job.run(survivors, layout=replicated(2), restore_snapshot=source)
    assert [e.kind for e in ends] == [ExitKind.FINISHED] * 2, ends
    past = job.reported(survivors, GroupFormed)[-1].past
    assert [report.step for report in past] == list(range(1, 8)), "rank 0 may die before it has sent its reports"
    assert job.losses(survivors) == pytest.approx(undisturbed(name), abs=3e-7)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_buffers_are_equal_on_all_ranks_and_those_of_one_process(make_job: Any, world_size: int) -> None:
    job = make_job(memory=True, **spec_of("batchnorm"))
    workers = job.workers(world_size)
    ends = job.run(workers, layout=replicated(world_size))
    assert [e.kind for e in ends] == [ExitKind.FINISHED] * world_size, ends
    assert job.losses(workers) == pytest.approx(undisturbed("batchnorm"), abs=3e-7)
    check_statistics(job.reports(workers[0]))


@pytest.mark.parametrize("phase", ["backward", "optimizer", "forward"])
def test_buffers_of_the_last_complete_step_outlive_a_lost_rank(make_job: Any, phase: str) -> None:
    """Also if the forward passes of the interrupted step have changed those in the modules."""
    is_kept = phase != "optimizer"
    budget = {"snapshot": {"budget": 1e-6}} if is_kept else {}
    job = make_job(memory=True, **spec_of("batchnorm") | budget)
    workers = job.workers(3)
    victim, survivors = workers[1], [workers[0], workers[2]]
    if is_kept:
        source = job.lose(workers, victim, phase, 5, layout=replicated(3))
    else:
        victim.strike(phase, 5, "kill")
        job.start(workers, layout=replicated(3))
        assert victim.died()
        source = job.in_memory(job.interrupt(survivors), survivors)
        assert source.step >= 4
    ends = job.run(survivors, layout=replicated(2), restore_snapshot=source)
    assert [e.kind for e in ends] == [ExitKind.FINISHED] * 2, ends
    assert job.losses(survivors) == pytest.approx(undisturbed("batchnorm"), abs=3e-7)
    check_statistics(job.reports(survivors[0]))


def check_statistics(reports: list[Any]) -> None:
    """The loop logs its buffers after each update, and how far apart they are on the ranks."""
    expected = plain_loop.undisturbed(file_of("batchnorm"))[1]
    assert reports and reports[-1].step == STEPS
    for report in reports:
        assert report.metrics["spread"] == 0.0
        known = {name: value for name, value in report.metrics.items() if name != "spread"}
        plain = {name: value for name, value in expected[report.step].items() if name != "spread"}
        assert known == pytest.approx(plain, rel=1e-6, abs=3e-7), report.step


def test_a_loop_that_yields_goes_on_with_more_workers_without_losing_a_step(make_job: Any) -> None:
    job = make_job(memory=True, **spec_of())
    workers = job.workers(2)
    workers[0].strike("forward", 4, "hold")
    generation = job.start(workers, layout=replicated(2))
    workers[0].reached()
    workers[0].call("request_yield", generation, False)  # its ballot of this step is not made yet
    workers[0].call("go")
    exits = [worker.exit() for worker in workers]
    assert [(e.kind, e.step, e.is_durable) for e in exits] == [(ExitKind.YIELDED, 5, False)] * 2, exits
    larger = workers + job.workers(1)
    ends = job.run(larger, layout=replicated(3), restore_snapshot=job.in_memory(exits, larger))
    assert [e.kind for e in ends] == [ExitKind.FINISHED] * 3, ends
    assert job.reported(larger, GroupFormed)[-1].start_step == 5
    assert job.losses(larger) == pytest.approx(undisturbed(), abs=3e-7)


def test_a_loop_goes_on_from_a_checkpoint(make_job: Any) -> None:
    job = make_job(**spec_of(), checkpoint={"every_steps": 3})
    workers = job.workers(2)
    workers[1].strike("forward", 7, "hold")
    job.start(workers, layout=replicated(2))
    workers[1].reached()
    job.wait_until_committed(workers, 6)
    workers[1].kill()
    job.interrupt(workers[:1])
    ends = job.run(workers[:1], layout=replicated(1))
    assert [e.kind for e in ends] == [ExitKind.FINISHED], ends
    assert job.reported(workers[:1], GroupFormed)[-1].start_step == 6
    assert job.losses(workers[:1]) == pytest.approx(undisturbed(), abs=3e-7)


@pytest.mark.cells(2)
@pytest.mark.parametrize("kind", ["ZeroDivisionError", "SystemExit", "GeneratorExit"])
def test_an_error_of_the_loop_names_its_line(make_job: Any, kind: str) -> None:
    job = make_job(**spec_of("mistaken", kind))
    [end] = job.run(job.workers(1), layout=replicated(1))
    assert end.kind is ExitKind.USER_ERROR and end.error is not None
    assert end.error.type == kind and end.error.line.endswith("mistaken.py:16 in train()"), end.error


def test_a_file_that_gives_nothing_to_shoal_run_is_one_sentence(make_job: Any) -> None:
    job = make_job(**spec_of("no_loop"))
    [end] = job.run(job.workers(1), layout=replicated(1))
    assert end.kind is ExitKind.USER_ERROR and end.error is not None
    assert end.error.message.startswith("tests/kit/loops/no_loop.py has ended without shoal.run(train).")


@pytest.mark.cells(1)
@pytest.mark.parametrize("launcher", [(), ("-m", "torch.distributed.run", "--nproc-per-node", "2")])
def test_without_a_service_the_loop_trains_in_its_own_process_and_goes_on_from_its_checkpoint(
    tmp_path: Path, launcher: tuple[str, ...]
) -> None:
    environment = {**os.environ, "SHOAL_CHECKPOINT_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    losses: dict[int, float] = {}
    for steps in (5, STEPS):
        program = [warm_python(), *launcher, str(LOOPS / "digits.py"), str(steps)]
        answer = subprocess.run(program, capture_output=True, text=True, env=environment, check=False)
        assert answer.returncode == 0, answer.stderr
        lines = re.findall(r"^step (\d+)  loss ([0-9.]+)", answer.stdout, re.MULTILINE)
        losses |= {int(step): float(loss) for step, loss in lines}
        assert f'"steps": {steps}' in answer.stdout and '"end": "finished"' in answer.stdout
    assert len(lines) == STEPS - 5, "the second run went on from the first one's checkpoint"
    assert losses == pytest.approx(undisturbed(), abs=2e-6)  # printed with six digits


@pytest.mark.parametrize("how", ["two_backwards", "two_updates", "plateau", "joint"])
def test_a_spelling_of_a_loop_trains_as_plain_torch_does(make_job: Any, how: str) -> None:
    """Backward passes of one micro-batch add up; each update has its own; run.loss is the global batch's."""
    job = make_job(memory=True, **spec_of("spelled", how))
    workers = job.workers(2)
    ends = job.run(workers, layout=replicated(2))
    assert [e.kind for e in ends] == [ExitKind.FINISHED] * 2, ends
    assert job.losses(workers) == pytest.approx(undisturbed("spelled", how), abs=5e-7)
    reports = job.reports(workers[0])
    assert {report.metrics["spread"] for report in reports} == {0.0}
    if how in ("two_updates", "joint"):
        for report in reports:
            plain = plain_loop.undisturbed(file_of("spelled"), how)[1][report.step + (how == "joint")]
            assert report.metrics == pytest.approx(plain, rel=1e-6, abs=3e-7), report.step


def test_tensors_of_different_lengths_are_gathered_with_their_gradients(make_job: Any) -> None:
    """One row of ones of rank 0 and two rows of twos of rank 1; each rank weighs the rows by 0, 1 and 2."""
    job = make_job(**spec_of("spelled", "unequal"))
    job.run(workers := job.workers(2), layout=replicated(2))
    (first, *_) = job.reports(workers[0])
    assert {name: first.metrics[name] for name in ("rows", "total", "gradient")} == {
        "rows": 3,
        "total": 10,
        "gradient": 0,
    }


def test_a_buffer_of_any_size_written_through_data_is_equal_on_all_ranks(make_job: Any) -> None:
    """And at every number of workers: a weighted mean of what the micro-batches have changed."""
    differing, numbers = [], {}
    for size in ("1", "16383", "16384", "16385"):
        for world_size in (1, 2):
            job = make_job(f"{size}-{world_size}", **spec_of("spelled", "queue", size))
            ends = job.run(workers := job.workers(world_size), layout=replicated(world_size))
            assert [e.kind for e in ends] == [ExitKind.FINISHED] * world_size, ends
            metrics = [report.metrics for report in job.reports(workers[0])]
            differing += [(size, world_size, one["spread"]) for one in metrics if one["spread"]]
            numbers[size, world_size] = [one["b_3_kept"] for one in metrics]
    assert differing == []
    assert all(found == pytest.approx(numbers["1", 1], rel=1e-6) for found in numbers.values()), numbers


def test_all_ranks_end_if_one_of_them_agrees_to(make_job: Any) -> None:
    job = make_job(**spec_of("spelled", "agreed"))
    ends = job.run(job.workers(2), layout=replicated(2))
    assert [(e.kind, e.step) for e in ends] == [(ExitKind.FINISHED, 4)] * 2, ends


def test_what_ranks_must_not_decide_alone_is_refused_in_a_sentence(make_job: Any) -> None:
    expected = {
        "alone": "rank 1 has left the loop after step 3, and the other ranks go on",
        "own_rate": "the learning rate differs between ranks in step 2",
        "own_decay": "the parameters of SGD differ between ranks",
        "scaled": "a GradScaler scales the loss",
        "misfit": "is float32 ['any', ",
    }
    differing = []
    for how, message in expected.items():
        job = make_job(how, **spec_of("spelled", how))
        ends = job.run(job.workers(2), layout=replicated(2))
        messages = [end.error.message if end.error is not None else str(end) for end in ends]
        differing += [(how, end.kind, text) for end, text in zip(ends, messages, strict=True) if message not in text]
        differing += [(how, end.kind) for end in ends if end.kind is not ExitKind.USER_ERROR]
    assert differing == []
