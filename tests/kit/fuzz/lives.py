"""Trains a description with the engine, as a supervisor does: at one worker, in a layout, and through a life of events.

A run ends with what it has seen, or with the reason why it has not come to its end; nothing here is a failed assertion.
Every wait has a limit, and a worker that hangs or dies is an answer. Called by `outcome_of`.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from kit.fuzz.draw import SAVED_AFTER, STEPS, Ways
from kit.fuzz.plans import world_of
from kit.fuzz.reference import Reference, Seen, array
from kit.processes.fleet import Fleet, Job, RemoteWorker
from shoal_workers.checkpoint.reader import load, read_catalogue
from shoal_workers.contract.exception_causes import LAYOUT_REFUSED
from shoal_workers.contract.layout import Layout, fully_sharded, plain
from shoal_workers.contract.messages import ExitKind, ProofDemand, WorkerExit
from shoal_workers.contract.snapshots import SnapshotSource
from shoal_workers.contract.worker_reports import StepReport, ValidationReport

_GRACE_S = 2.0
"""Between the first bad end of a rank and the interruption of the others."""


class Drawn(Protocol):
    """A description of a task, or of a loop."""

    @property
    def ways(self) -> Ways: ...

    @property
    def reference(self) -> tuple[str, dict[str, Any]]:
        """The function that computes what is right, and its argument."""


@dataclass
class Broken(Exception):
    """A run that did not come to its end."""

    what: str
    """refused, late_refusal, traceback, engine_error, hang, died, collective or another ExitKind."""
    kind: str
    """Name of the mistake that was refused; empty: none was named."""
    message: str
    run: str


@dataclass(frozen=True)
class Limits:
    run_s: float = 60.0
    """One generation, on a busy machine."""


class Lives:
    """All runs of one description; every process and file is gone after `close`."""

    def __init__(self, fleet: Fleet, description: Drawn, spec: dict[str, Any], limits: Limits) -> None:
        self._fleet = fleet
        self._description = description
        self._spec = spec
        self._limits = limits
        self._root = Path(tempfile.mkdtemp(prefix="shoal-fuzz-", dir="/dev/shm"))
        self._name = ""
        self._num_jobs = 0
        self.saved = ""
        """The checkpoint of the undisturbed run after SAVED_AFTER steps."""

    def close(self) -> None:
        self._fleet.kill_all()
        shutil.rmtree(self._root, ignore_errors=True)

    def plain(self) -> Reference:
        worker = self._fleet.start({}, "")
        found: Reference = worker.call("call", *self._description.reference)
        self._fleet.kill_all()
        return found

    def alone(self) -> Seen:
        """One worker, undisturbed."""
        is_plain = self._description.ways.layout.get("shard") == "none"
        return self._undisturbed("1 worker", plain(1) if is_plain else fully_sharded(1))

    def together(self) -> Seen:
        """The drawn layout, undisturbed."""
        layout = Layout(**self._description.ways.layout)
        return self._undisturbed(f"layout {_words(self._description.ways.layout)}", layout)

    def eventful(self) -> Seen:
        """From the checkpoint of the undisturbed run: a death, then another layout."""
        ways = self._description.ways
        with self._job() as job:
            self._name = f"resume in {_words(ways.resumed)}"
            group = job.workers(world_of(ways.resumed))
            everyone, layout, source = list(group), Layout(**ways.resumed), None
            restore: dict[str, Any] = {"restore_from": self.saved}
            if ways.killed is not None:
                phase, step = ways.killed
                group[-1].strike(phase, step, "kill")
                job.start(group, layout=layout, proof=_demand(layout), **restore)
                exits = self._ends(job, group, dead=group[-1])
                layout = Layout(**ways.survived)
                group = group[: layout.world_size]
                self._name += f", kill in {phase} {step}, then {_words(ways.survived)}"
                source = _in_memory(job, exits, everyone[:-1])
                restore = {"is_recovery": True}
            if ways.changed is not None and (source is None or source.step <= STEPS - 2):
                at = STEPS - 2
                group[0].strike("forward", at, "hold")
                generation = job.start(
                    group,
                    layout=layout,
                    restore_snapshot=source,
                    proof=_demand(layout),
                    **self._from(job, source, restore),
                )
                self._reached(job, group)
                group[0].call("request_yield", generation, False)
                group[0].call("go")
                exits = self._ends(job, group, expected=ExitKind.YIELDED)
                source = _in_memory(job, exits, group)
                restore = {}
                changed = Layout(**ways.changed)
                self._name += f", change to {_words(ways.changed)}"
                layout, group = changed, group[: changed.world_size]
                added = job.workers(changed.world_size - len(group))
                everyone, group = everyone + added, group + added
            return self._finish(job, group, everyone, layout, source, self._from(job, source, restore))

    def _from(self, job: Job, source: SnapshotSource | None, restore: Mapping[str, Any]) -> dict[str, Any]:
        """Where a generation begins: in memory, else at its own newest checkpoint, else where the life began."""
        if source is None and "restore_from" not in restore and not job.committed:
            return {**restore, "restore_from": self.saved}
        return dict(restore)

    def _undisturbed(self, name: str, layout: Layout) -> Seen:
        self._name = name
        with self._job() as job:
            group = job.workers(layout.world_size)
            seen = self._finish(job, group, group, layout, None, {"restore_from": None})
            (self.saved,) = [one for one in job.committed if f"step-{SAVED_AFTER:012d}" in one]
            kept = self._root / "kept"
            shutil.rmtree(kept, ignore_errors=True)
            kept.mkdir()
            self.saved = str(shutil.move(self.saved, kept))
            return seen

    def _finish(
        self,
        job: Job,
        group: list[RemoteWorker],
        everyone: list[RemoteWorker],
        layout: Layout,
        source: SnapshotSource | None,
        restore: Mapping[str, Any],
    ) -> Seen:
        job.start(group, layout=layout, restore_snapshot=source, proof=_demand(layout), **restore)
        self._ends(job, group)
        job.commit(group)
        steps: dict[int, StepReport] = {}
        for report in sorted(_reports(everyone, StepReport), key=lambda report: report.generation):
            steps[report.step] = report
        (directory,) = [one for one in job.committed if f"step-{STEPS:012d}" in one]
        return self._seen(steps, group, directory)

    def _seen(self, steps: Mapping[int, StepReport], group: list[RemoteWorker], directory: str) -> Seen:
        """`directory`: of the checkpoint of the last step."""
        validations = [one.loss for one in _reports(group, ValidationReport) if one.step == STEPS]
        return Seen(
            losses={step: report.loss for step, report in steps.items()},
            norms={step: report.grad_norm for step, report in steps.items()},
            metrics={step: report.metrics.get("accuracy", 0.0) for step, report in steps.items()},
            validation=validations[-1],
            tensors=_model_in(directory),
        )

    def _ends(
        self,
        job: Job,
        group: list[RemoteWorker],
        *,
        dead: RemoteWorker | None = None,
        expected: ExitKind = ExitKind.FINISHED,
    ) -> list[WorkerExit]:
        """The exits of all ranks. If one must die, the others are interrupted, as a supervisor does. Raises Broken."""
        deadline = time.monotonic() + self._limits.run_s
        exits: dict[int, WorkerExit] = {}
        first_bad: float | None = None
        is_interrupted = False
        while len(exits) < len(group) - (dead is not None and dead.gone.is_set()):
            for index, worker in enumerate(group):
                found = None if index in exits else worker.exit_so_far()
                if found is not None:
                    exits[index] = found
            gone = [worker for index, worker in enumerate(group) if worker.gone.is_set() and index not in exits]
            unexpected = [worker for worker in gone if worker is not dead]
            is_bad = bool(gone) or any(one.kind is not expected for one in exits.values())
            now = time.monotonic()
            first_bad = first_bad if first_bad is not None or not is_bad else now
            if (
                first_bad is not None
                and not is_interrupted
                and (now > first_bad + _GRACE_S or (gone and not unexpected))
            ):
                is_interrupted = True
                for index, worker in enumerate(group):
                    if index not in exits and not worker.gone.is_set():
                        worker.call("interrupt", job.generation)
            if unexpected and is_interrupted and len(exits) + len(gone) == len(group):
                raise Broken("died", "", "a worker's process died", self._name)
            if now > deadline:
                late = [index for index in range(len(group)) if index not in exits]
                raise Broken("hang", "", f"ranks {late} did not leave", self._name)
        errors = [one for one in exits.values() if one.kind not in (expected, ExitKind.INTERRUPTED)]
        if dead is not None:
            errors = [one for one in errors if one.kind is not ExitKind.COLLECTIVE_FAILED]
        if errors or (dead is None and len(exits) < len(group)):
            raise self._broken(errors, group)
        if dead is None and any(one.kind is not expected for one in exits.values()):
            raise Broken("interrupted", "", "", self._name)
        job.commit([worker for worker in group if not worker.gone.is_set()])
        return list(exits.values())

    proven_steps = 0
    """Completed steps within which a job is refused early."""

    def _broken(self, exits: list[WorkerExit], group: list[RemoteWorker]) -> Broken:
        worst = min(exits, key=lambda one: one.kind is ExitKind.COLLECTIVE_FAILED)
        report = worst.error
        message = "" if report is None else f"{report.type}: {report.message}"
        if worst.kind is ExitKind.USER_ERROR and report is not None:
            if report.mistake == LAYOUT_REFUSED:
                return Broken("refused", report.mistake, report.message, self._name)
            if report.mistake:
                reports = _reports([one for one in group if not one.gone.is_set()], StepReport)
                is_early = all(one.step <= self.proven_steps for one in reports)
                is_first = is_early and not self.is_restoring
                return Broken("refused" if is_first else "late_refusal", report.mistake, report.message, self._name)
            return Broken("traceback", "", f"{message}\n{report.traceback[-1500:]}", self._name)
        trace = "" if report is None else report.traceback[-1500:]
        return Broken(str(worst.kind), "", f"{message}\n{trace}", self._name)

    @property
    def is_restoring(self) -> bool:
        return self._name.startswith("resume")

    def _reached(self, job: Job, group: list[RemoteWorker]) -> None:
        """Wait until rank 0 is held. Raises Broken if the group ends before."""
        deadline = time.monotonic() + self._limits.run_s
        held = group[0]._inbox["reached"]
        while held.empty():
            if any(worker.gone.is_set() or not worker._inbox["exit"].empty() for worker in group):
                self._ends(job, group, expected=ExitKind.YIELDED)
                raise Broken("ended_early", "", "", self._name)
            if time.monotonic() > deadline:
                raise Broken("hang", "", "before the change of layout", self._name)
            time.sleep(0.005)
        held.get()

    @contextmanager
    def _job(self) -> Iterator[Job]:
        self._num_jobs += 1
        folder = self._root / str(self._num_jobs)
        (folder / "memory").mkdir(parents=True)
        try:
            yield Job(self._fleet, self._spec, folder / "checkpoints", folder / "memory")
        finally:
            self._fleet.kill_all()
            shutil.rmtree(folder, ignore_errors=True)


def _words(layout: Mapping[str, Any]) -> str:
    return f"{Layout(**layout).describe()} {layout.get('shard', '')}".strip()


def _demand(layout: Layout) -> ProofDemand:
    """As the supervisor demands of a layout that the spec fixes."""
    return ProofDemand.NONE if layout.pp * layout.cp * layout.tp * layout.ep == 1 else ProofDemand.IF_POSSIBLE


def _in_memory(job: Job, exits: list[WorkerExit], survivors: list[RemoteWorker]) -> SnapshotSource | None:
    try:
        return job.in_memory(exits, survivors)
    except ValueError:  # there is none
        return None


def _reports(workers: list[RemoteWorker], kind: type[Any]) -> list[Any]:
    return [
        item
        for worker in workers
        for item in (worker.reports if worker.gone.is_set() else worker.poll())
        if isinstance(item, kind)
    ]


def _model_in(directory: str) -> dict[str, Any]:
    catalogue, extra = read_catalogue(directory)
    state = {
        name: torch.empty(value.shape, dtype=value.dtype)
        for name, value in catalogue.items()
        if name.startswith("model.")
    }
    load(state, directory=directory)
    tensors = {name.removeprefix("model."): array(value) for name, value in state.items()}
    for name in extra["export"].get("scalars", ()):  # as an export writes them
        tensors[name] = tensors[name].reshape(())
    return tensors
