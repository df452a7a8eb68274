"""What a task carries from one micro-batch to the next outside of buffers is found by what it does, and named."""

from __future__ import annotations

from typing import Any

import pytest

from kit.tasks.carrying_tasks import KEPT_IN
from shoal_workers.contract.messages import ExitKind

SPEC: dict[str, Any] = {
    "task": "carrying_tasks:Carrying",
    "batch": {"global_size": 8, "micro_size": 2},
    "stop": {"steps": 3},
    "checkpoint": {"every_steps": None},
    "validation": {"samples": 0},
    "seed": 7,
}
NAMED = {
    "number": "changes 'number' of the task",
    "module": "changes 'temperature' of the model",
    "gradient": "changes 'number' of the task",
    "list": "changes 'ring' of the task",
    "tensor": "changes 'mean' of the task",
    "dict": "changes 'kept' of the task",
    "closure": "changes 'later' of the task",
    "teacher": "changes 'teacher' of the task",
    "norm": "changes 'eps' of norm",
    "first": "changes 'first' of the task",
    "hook": "changes 'kept' of the task",
    "generator": "changes 'random' of the task",
    "array": "changes 'array' of the task",
    "object": "changes 'object' of the task",
    "global": "changes 'GLOBAL' of the module carrying_tasks",
    "condition": "changes 'num_calls' of the task",
    "slots": "changes 'slotted' of the task (carrying_tasks.py:",
    "partial": "changes 'partial' of the task",
    "queue": "changes 'queue' of the task",
    "ordered": "changes 'ordered' of the task",
    "pair": "changes 'pair' of the task",
    "method": "changes 'method' of the task",
    "default": "changes 'grown_by_default' of the module carrying_tasks (carrying_tasks.py:",
    "class": "changes 'num_calls' of the class of the model",
    "cache": "changes 'first_seen' of the module carrying_tasks",
    "cached_method": "changes 'remembered' of the class Carrying",
    "bounded": "'remembered_for_a_while' of the class Carrying (carrying_tasks.py:",
    "counter": "changes 'counter' of the task",
    "rows": "changes 'rows' of the task",
    "function": "'numbers' of the task (carrying_tasks.py:",
    "nested": "changes 'settings' of the task",
    "far_counter": "changes 'counter' of the task",
    "bank": "changes 'seen' of the task",
    "history": "changes 'history' of the task",
    "collated": "changes 'num_collated' of the task",
    "read": "changes 'num_read' of the data set",
}
"""The others train: counters that are only logged, caches that only remember, what cannot be named (the log says it),
and nothing."""
CANNOT_BE_NAMED = "is another one when it is computed a second time, and it is not known why"


def test_an_attribute_that_reaches_a_loss_or_a_gradient_is_refused_with_its_name(make_job: Any) -> None:
    differing = []
    for kept_in in KEPT_IN:
        job = make_job(kept_in, **SPEC, model={"kept_in": kept_in})
        (worker,) = job.workers(1)
        job.start([worker])
        end = worker.exit()
        message = end.error.message if end.error is not None else ""
        log = " ".join(line.text for line in worker.new_logs())
        is_refused, has_trained = end.kind is ExitKind.USER_ERROR, bool(job.reports(worker))
        if not is_refused == (kept_in in NAMED) == (not has_trained) or NAMED.get(kept_in, "") not in message:
            differing.append((kept_in, str(end.kind), message[:200]))
        if (CANNOT_BE_NAMED in log) != (kept_in == "time"):
            differing.append((kept_in, "log", log[:200]))
    assert differing == []


@pytest.mark.parametrize("kept_in", ["number", "tensor"])
def test_the_state_of_a_task_is_that_of_a_plain_loop_equal_on_all_ranks_and_restored(
    make_job: Any, reference: Any, kept_in: str
) -> None:
    """With one micro-batch in a step the bits of the plain loop are meant; with four the rule of buffers."""
    task = {**SPEC, "task": "carrying_tasks:Declaring", "model": {"kept_in": kept_in}, "stop": {"steps": 6}}
    task |= {"checkpoint": {"every_steps": 3}, "elasticity": {"max_workers": 2}}
    whole = {**task, "batch": {"global_size": 8, "micro_size": 8}, "elasticity": {"max_workers": 1}}
    losses = {}
    for name, spec, world_size in (("whole", whole, 1), ("one", task, 1), ("two", task, 2)):
        job = make_job(name, **spec)
        ends = job.run(workers := job.workers(world_size))
        assert [end.kind for end in ends] == [ExitKind.FINISHED] * world_size, ends
        losses[name] = job.losses(workers)
    assert losses["whole"] == pytest.approx(reference(6, **whole), rel=1e-6)
    assert losses["two"] == pytest.approx(losses["one"], rel=1e-6)
    (early,) = [directory for directory in job.committed if "step-000000000003" in directory]
    resumed = make_job("resumed", **task)
    (end,) = resumed.run(workers := resumed.workers(1), restore_from=early)
    assert end.kind is ExitKind.FINISHED, end
    assert resumed.losses(workers) == pytest.approx({step: losses["one"][step] for step in (4, 5, 6)}, rel=1e-6)


def test_a_part_that_is_built_in_evaluation_mode_and_trains_is_said(make_job: Any) -> None:
    said = {}
    for keeps in (False, True):
        job = make_job(f"keeps {keeps}", **{**SPEC, "task": "carrying_tasks:Evaluating", "model": {"keeps": keeps}})
        [end] = job.run(workers := job.workers(1))
        assert end.kind is ExitKind.FINISHED, end
        said[keeps] = sum("'norm' was in evaluation mode" in line.text for line in workers[0].logs)
    assert said == {False: 1, True: 0}
