"""What a task carries from one micro-batch to the next outside of buffers is found by what it does, and named."""

from __future__ import annotations

from typing import Any

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
}
"""The others train: a counter that is only logged, what cannot be named (the log says it), and nothing."""
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
        if (CANNOT_BE_NAMED in log) != (kept_in == "closure"):
            differing.append((kept_in, "log", log[:200]))
    assert differing == []
