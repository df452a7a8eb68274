"""Trials of a loop: short runs of it, each in a fork of a process that has its function, that have to be equal.

    undisturbed   the first steps, in one process
    repeated      the same again: what differs between these two is not the same in any two runs
    newcomer      another process enters after a step, with what is tracked, as a worker does that joins
    survivor      is interrupted in the next step, as by a lost worker, and calls the function again
    split         two ranks share the micro-batches
    noisy         undisturbed, with gradients that differ by more than rounding, in both directions

It is the engine that trains. A trial has at most `Plan.most_micro_batches` of each half of a step. What they have shown
is compared by verdict.py. Called by the proof of a loop (proof.py) and by `shoal check` (check_loop.py).
"""

from __future__ import annotations

import gc
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shoal_workers.checkpoint.commit import marker_of, write_marker
from shoal_workers.contract.checks.legality import loop_layout
from shoal_workers.contract.messages import Assignment, ErrorReport, ExitKind, Phase, Progress, WorkerExit
from shoal_workers.contract.snapshots import SnapshotServer, SnapshotSource
from shoal_workers.contract.spec import JobSpec
from shoal_workers.contract.worker_reports import SavedPart, StepReport
from shoal_workers.engine.group.store.server import StoreServer
from shoal_workers.engine.loop.run import Run
from shoal_workers.engine.loop.variables import values_of, variables_in, variables_of
from shoal_workers.engine.loop.verdict import (
    NEWCOMER,
    NOISY,
    REPEATED,
    SPLIT,
    SURVIVOR,
    UNDISTURBED,
    Trial,
    verdict,
)
from shoal_workers.engine.process.engine_error import engine_error
from shoal_workers.engine.process.outbox import Outbox
from shoal_workers.machine_limits import available_bytes
from shoal_workers.snapshot_store.store import SnapshotStore

NOISE = 1e-6
"""Share of the largest gradient: more than rounding makes of any."""
_MOST_PARAMETERS = 50_000_000
_COPIES = 10
"""Times the parameters, what two ranks need beside each other with gradients and the state of an optimizer."""
_TIMES = ("_runtime", "_per_second")
"""What a trainer logs of its own speed, in its history."""
_SAVED_S = 30.0
_POLL_S = 0.05
_LOOKED_AT = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)


class TrialEngine(Protocol):
    """What a trial needs of an engine."""

    @property
    def progress(self) -> Progress: ...

    def run(self, assignment: Assignment) -> WorkerExit: ...

    def interrupt(self, generation: int) -> bool: ...

    def close(self) -> None: ...


class Crashed(Exception):
    """The process of a trial has ended without a result; its exit status, or minus the number of a signal."""

    def __init__(self, code: int) -> None:
        super().__init__(f"exit status {code}" if code > 0 else signal.Signals(-code).name)
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What all trials of a loop have in common."""

    spec: JobSpec
    function: Callable[[Run], None]
    make_engine: Callable[..., TrialEngine]
    directory: Path
    """Empty, and of these trials alone."""
    entered_after: int
    """Completed steps when a newcomer enters."""
    steps_after: int
    most_micro_batches: int
    is_silent: bool
    """No rank is to print or write files, and large models are not tried."""
    on_thread: Callable[[Callable[[], Any], Callable[[], object]], Any]
    """Calls the first function, and the second one if it is interrupted."""

    @property
    def last_step(self) -> int:
        return self.entered_after + self.steps_after


def find(plan: Plan, names: Sequence[str], say: Callable[[str], None]) -> tuple[dict[str, Any], Trial]:
    """Runs the trials in their order, and returns what `verdict` says of them, or what has failed; and the undisturbed
    one. `say`: called with the name of each. Raises Crashed."""
    gc.freeze()  # no trial looks at what it shares with the others
    trials: dict[str, Trial] = {}
    findings: dict[str, Any] = {}
    for name in (*names, *(extra for extra in (REPEATED, *NOISY) if extra not in names)):
        if name not in names and (findings["is_whole"] or (name in NOISY and SPLIT not in trials)):
            continue
        if name == SPLIT and trials[UNDISTURBED].most_workers == 1:
            continue
        say(name)
        for key, trial in _forked(plan, name).items():
            trials[key] = trial
            if trial.failed is not None:
                return {"failed": trial.failed, "trial": key}, trials[UNDISTURBED]
        findings = verdict(trials, Path.cwd())
        if len(trials[UNDISTURBED].losses) <= plan.entered_after:
            break  # it is too short to be interrupted
    return findings, trials[UNDISTURBED]


def _forked(plan: Plan, name: str) -> dict[str, Trial]:
    """Each trial begins with the variables that the file has left. Main thread, while there is no other."""
    world_size = 2 if name == SPLIT else 1
    address, key = os.pipe(), secrets.token_hex(16)
    files, pids = {}, {}
    for rank in range(world_size):
        trial_name = f"{name} {rank}" if rank else name
        files[trial_name] = plan.directory / f"{trial_name}.trial"
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                trial = _Try(plan, name, rank, world_size, address, key).run()
                torch.save(vars(trial), files[trial_name])
                status = 0
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                sys.stderr.flush()
                os._exit(status)
        pids[pid] = trial_name
    for end in address:
        os.close(end)
    trials: dict[str, Trial] = {}
    while pids:
        pid, status = os.wait()
        if (trial_name := pids.pop(pid, "")) == "":
            continue
        code = os.waitstatus_to_exitcode(status)
        if code == 0:
            trials[trial_name] = Trial(**torch.load(files[trial_name]))
        if code or trials[trial_name].failed is not None:
            for other in pids:
                os.kill(other, signal.SIGKILL)
                os.waitpid(other, 0)
            if code:
                raise Crashed(code)
            return {trial_name: trials[trial_name]}
    return trials


class _Try:
    """One rank of a trial, in a process of its own."""

    def __init__(self, plan: Plan, name: str, rank: int, world_size: int, address: tuple[int, int], key: str) -> None:
        self._plan = plan
        self._name = name
        self._rank = rank
        self._world_size = world_size
        self._trial = Trial(entered_after=plan.entered_after, steps_after=plan.steps_after)
        self._run: Run | None = None
        self._outbox = Outbox("check")
        self._seq = 0
        self._saved: list[SavedPart] = []
        self._store = StoreServer("127.0.0.1", key)
        if rank == 0:
            os.write(address[1], f"{self._store.port}\n".encode())
        self._port = self._store.port if rank == 0 else int(os.read(address[0], 16))
        self._snapshots: SnapshotStore | None = None
        if not plan.is_silent:
            memory = plan.directory / f"{name}-{rank}-memory"
            memory.mkdir()
            self._snapshots = SnapshotStore(
                job_id="check", attempt=1, worker_id="check", node_id="check", key=secrets.token_hex(16), root=memory
            )
        self._engine = plan.make_engine(
            plan.spec,
            checkpoint_root=str(plan.directory / f"{name}-checkpoints"),
            outbox=self._outbox,
            store=self._store,
            snapshot_store=self._snapshots,
            on_phase=self._on_phase,
            loop=self._loop,
            is_trial=True,
        )
        self._generation = 0
        self._last_step = plan.last_step

    def run(self) -> Trial:
        try:
            self._plan.on_thread(self._tries, lambda: self._engine.interrupt(self._generation))
        finally:
            self._engine.close()
        return self._trial

    def _tries(self) -> None:
        plan = self._plan
        if self._name == NEWCOMER:
            self._train(restore_from=(plan.directory / "checkpoint").read_text())
        elif self._name == SURVIVOR:
            self._last_step = plan.entered_after
            ended = self._train()
            self._last_step = plan.last_step
            if ended is not None and ended.kind is ExitKind.INTERRUPTED:
                self._train(restore_snapshot=self._in_memory(ended))
        else:
            self._train()
            if self._name == UNDISTURBED:
                self._commit()

    def _train(self, **source: Any) -> WorkerExit | None:
        """One generation. None if it has failed."""
        self._generation += 1
        assignment = Assignment(
            job_id="check",
            attempt=1,
            generation=self._generation,
            rank=self._rank,
            local_rank=self._rank,
            layout=loop_layout(self._plan.spec.parallelism, self._world_size),
            store_host=self._store.host,
            store_port=self._port,
            **{"restore_from": None, **source},
        )
        try:
            ended = self._engine.run(assignment)
        except Exception as error:
            report = getattr(error, "report", None)
            error_report = report if isinstance(report, ErrorReport) else engine_error(error, Phase.PREPARING)
            self._trial.failed = failed(error_report)
            return None
        self._read_reports()
        # The other rank of two leaves first, perhaps.
        is_left = self._world_size > 1 and self._last_step in self._trial.tracked
        if ended.error is not None and self._trial.failed is None and not is_left:
            self._trial.failed = failed(ended.error, after=self._describe_entry())
        return ended if self._trial.failed is None else None

    def _describe_entry(self) -> str:
        if self._name == NEWCOMER or self._generation > 1:
            return f"entered again after step {self._plan.entered_after}"
        return "with two workers" if self._name == SPLIT else ""

    def _loop(self, run: Run) -> None:
        run.most_micro_batches = self._plan.most_micro_batches
        run.is_silent = self._plan.is_silent
        run.noise = NOISE * (1 - 2 * NOISY.index(self._name)) if self._name in NOISY else 0.0
        run.observer = self
        self._run = run
        self._plan.function(run)

    def observe(self, step: int, check: Callable[[], None], note: Callable[[str], None]) -> None:
        """A step is complete."""
        run = self._run
        assert run is not None
        if step == self._plan.last_step:  # after others the next forward pass shows what a newcomer shows there
            self._look(run, step)
        if step == self._last_step:
            # The other rank completes the step, too, before this one leaves it.
            run.agree(flag=False)
            if self._world_size > 1:
                self._engine.interrupt(self._generation)

    def settle(self, check: Callable[[], None], note: Callable[[str], None]) -> None:
        """A checkpoint is about to be saved."""

    def _on_phase(self, phase: Phase, step: int) -> None:
        run, trial = self._run, self._trial
        if run is None or phase not in _LOOKED_AT:
            return
        trial.steps_per_epoch, trial.most_workers = run.steps_per_epoch, run.most_workers
        if self._plan.is_silent and not trial.tracked and (why := _too_large(run)):
            trial.failed = {"message": why}
            self._engine.interrupt(self._generation)
            return
        if step not in trial.tracked:
            self._look(run, step)
        if step == self._plan.entered_after and step not in trial.variables:
            directory, objects = Path.cwd(), run.objects
            left_out: dict[int, object] = {id(tracked): tracked for tracked in objects.values()} | {id(run): run}
            variables = variables_of(sys._getframe(), directory, left_out) | variables_in(objects, directory)
            trial.variables[step] = {name: (one.file, one.kind, dict(one.values)) for name, one in variables.items()}
        if step >= self._last_step:
            self._engine.interrupt(self._generation)

    def _look(self, run: Run, step: int) -> None:
        directory = Path.cwd()
        self._trial.tracked[step] = {
            name: {path: value for path, value in values_of(tracked, directory).items() if not path.endswith(_TIMES)}
            for name, tracked in run.objects.items()
            # Another object may count what only this rank has seen, for a log. What it does to the model shows there.
            if self._name != SPLIT or isinstance(tracked, (torch.nn.Module, Optimizer, LRScheduler))
        }

    def _in_memory(self, ended: WorkerExit) -> SnapshotSource:
        assert self._snapshots is not None
        newest = max(ended.snapshot_parts, key=lambda part: (part.step, part.generation))
        server = SnapshotServer(node_id="check", host="127.0.0.1", port=self._snapshots.port)
        return SnapshotSource(
            generation=newest.generation, world_size=newest.world_size, step=newest.step, parts=(server,)
        )

    def _read_reports(self) -> None:
        poll = self._outbox.poll(self._seq, 0.0, self._engine.progress)
        self._seq = poll.seq
        for item in poll.reports:
            if isinstance(item, StepReport):
                numbers = {"loss": item.loss, "grad_norm": item.grad_norm, "lr": item.lr}
                if not self._plan.is_silent and self._name != SPLIT:
                    numbers |= item.metrics
                self._trial.losses[item.step] = {name: number for name, number in numbers.items() if number is not None}
                self._trial.step_s = item.step_s
            elif isinstance(item, SavedPart):
                self._saved.append(item)

    def _commit(self) -> None:
        """The checkpoint from which the newcomer goes on. It is written in the background."""
        entered_after, deadline_mono = self._plan.entered_after, time.monotonic() + _SAVED_S
        while not (parts := [part for part in self._saved if part.step == entered_after]):
            if len(self._trial.losses) < entered_after or time.monotonic() > deadline_mono:
                return
            poll = self._outbox.poll(self._seq, _POLL_S, self._engine.progress)
            self._seq = poll.seq
            self._saved += [item for item in poll.reports if isinstance(item, SavedPart)]
        write_marker(parts[0].directory, marker_of(parts[:1], job_id="check", attempt=1, now=time.time()))
        (self._plan.directory / "checkpoint").write_text(parts[0].directory)


def failed(report: ErrorReport, after: str = "") -> dict[str, Any]:
    """What is said of a trial that has failed."""
    return {**report.model_dump(mode="json"), "sentence": report.sentence, "after": after}


def _too_large(run: Run) -> str:
    """Returns why the model is not tried; empty: it is."""
    modules = [tracked for tracked in run.objects.values() if isinstance(tracked, torch.nn.Module)]
    parameters = {id(one): one for module in modules for one in module.parameters()}.values()
    number, needed = sum(one.numel() for one in parameters), _COPIES * sum(one.nbytes for one in parameters)
    if number > _MOST_PARAMETERS:
        return f"it has {number:,} parameters, and up to {_MOST_PARAMETERS:,} are tried"
    left = available_bytes()
    return f"a trial needs {needed >> 20:,} MiB of memory, and {left >> 20:,} are left" if needed > left else ""
