"""Workers that are shared by many tests, for matrices of short runs."""

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kit.processes.fleet import Fleet, Job, RemoteWorker
from shoal_workers.contract.layout import Layout
from shoal_workers.contract.messages import ExitKind
from shoal_workers.contract.worker_reports import StepReport, ValidationReport


@dataclass(frozen=True)
class Plain:
    """What the undisturbed run in plain torch has seen; steps count from 1."""

    losses: dict[int, float]
    norms: dict[int, float]
    validation: float
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)


class WorkerPool:
    """Workers of one job that are shared by tests. Each test is a generation of its own from the seed, with its
    layout."""

    def __init__(self, fleet: Fleet, spec: dict[str, Any], root: Path) -> None:
        self.spec = spec
        self._fleet = fleet
        self._job = Job(fleet, spec, root, None)
        self._workers: list[RemoteWorker] = []

    def train(self, layout: Layout) -> Plain:
        """From the seed to the last step."""
        missing = layout.world_size - len(self._workers)
        self._workers += self._job.workers(missing) if missing > 0 else []
        group = self._workers[: layout.world_size]
        try:
            self._job.start(group, layout=layout, restore_from=None, store_timeout_s=90.0)
            exits = [worker.exit(timeout_s=150.0) for worker in group]  # eight processes on two busy cores are slow
            self._job.commit(group)
            faults = {worker_exit.error.traceback for worker_exit in exits if worker_exit.error}
            assert [one.kind for one in exits] == [ExitKind.FINISHED] * len(group), "\n".join(sorted(faults))
        except BaseException:  # a worker that may still hang must not reach the next test
            self._fleet.kill_all()
            self._workers.clear()
            raise
        shutil.rmtree(self._job.root)
        generation = self._job.generation
        reports = [item for item in group[0].poll() if getattr(item, "generation", None) == generation]
        steps = [item for item in reports if isinstance(item, StepReport)]
        (validation,) = [item.loss for item in reports if isinstance(item, ValidationReport)]
        return Plain(
            losses={r.step: r.loss for r in steps},
            norms={r.step: r.grad_norm for r in steps},
            validation=validation,
            metrics={r.step: dict(r.metrics) for r in steps},
        )
