"""Trials of a loop: short runs that must give equal results, each in a fork of a process that has the loop's function.

    undisturbed   the first steps, in one process
    repeated      the same again; whatever differs from the first is not reproducible
    newcomer      a new process restores the tracked objects after a step, as a worker that joins
    survivor      interrupted in the next step, as by a lost worker; it calls the function again
    split         two ranks share the micro-batches
    noisy         undisturbed, with gradients that differ by more than rounding, in both directions

Trials train with the real engine. They compute at most `TrialPlan.most_micro_batches` of each half of a step.
verdict.py compares the results. For the proof of a loop (proof.py) and for `shoal check` (check_loop.py).
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
from shoal_workers.engine.loop.tracked import Stateful, Tracked
from shoal_workers.engine.loop.variables import (
    Values,
    values_of,
    variable_of_gradients,
    variables_in,
    variables_of,
    variables_of_collates,
)
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
"""Noise as a share of the largest gradient. More than rounding makes of any gradient."""
_MOST_PARAMETERS = 50_000_000
_COPIES = 10
"""Memory of two ranks with gradients and optimizer state, as a multiple of the parameters."""
_TIMES = ("_runtime", "_per_second")
"""Suffixes of what a trainer logs of its speed in its history, which differs between any two runs."""
_SAVED_S = 30.0
"""Seconds that the save of the checkpoint may take."""
_POLL_S = 0.05
_RECORDED_PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)


class TrialEngine(Protocol):
    """The part of an engine that trials use."""

    @property
    def progress(self) -> Progress: ...

    def run(self, assignment: Assignment) -> WorkerExit: ...

    def interrupt(self, generation: int) -> bool: ...

    def close(self) -> None: ...


class Crashed(Exception):
    """The process of a trial ended without a result. `code`: its exit status, or minus the number of a signal."""

    def __init__(self, code: int) -> None:
        super().__init__(f"exit status {code}" if code > 0 else signal.Signals(-code).name)
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialPlan:
    """What the trials of a loop have in common."""

    spec: JobSpec
    function: Callable[[Run], None]
    make_engine: Callable[..., TrialEngine]
    directory: Path
    """An empty directory, used by these trials only."""
    entered_after: int
    """Completed steps when a newcomer enters."""
    steps_after: int
    """Further steps that a newcomer trains."""
    most_micro_batches: int
    """Micro-batches of each half of a step, at most."""
    is_silent: bool
    """True if ranks must neither print nor write files, and large models are not tried."""
    on_thread: Callable[[Callable[[], Any], Callable[[], object]], Any]
    """Calls the first function, and the second one if it is interrupted."""

    @property
    def last_step(self) -> int:
        return self.entered_after + self.steps_after


def run_trials(plan: TrialPlan, names: Sequence[str], say: Callable[[str], None]) -> tuple[dict[str, Any], Trial]:
    """Run trials one after the other. Return the findings of `verdict`, or a failure, and the undisturbed trial.

    Repeated and noisy trials are added if they are needed to explain a difference.

    Args:
        names: names of the trials; the undisturbed one first.
        say: called with the name of each trial before it begins.

    Raises:
        Crashed: the process of a trial ended without a result.
    """
    gc.freeze()  # otherwise each collection in a trial would copy the memory that it shares with the others
    trials: dict[str, Trial] = {}
    findings: dict[str, Any] = {}
    for name in (*names, *(extra for extra in (REPEATED, *NOISY) if extra not in names)):
        if name not in names and (findings["is_whole"] or (name in NOISY and SPLIT not in trials)):
            continue
        if name == SPLIT and trials[UNDISTURBED].most_workers == 1:
            continue
        say(name)
        for key, trial in _run_forked(plan, name).items():
            trials[key] = trial
            if trial.failed is not None:
                return {"failed": trial.failed, "trial": key}, trials[UNDISTURBED]
        findings = verdict(trials, Path.cwd())
        if len(trials[UNDISTURBED].losses) <= plan.entered_after:
            break  # the loop is too short to be interrupted
    return findings, trials[UNDISTURBED]


def _run_forked(plan: TrialPlan, name: str) -> dict[str, Trial]:
    """Run the ranks of a trial, each in a fork, and return their results by name. Call it without other threads.

    A trial thus begins with the variables as they were before `shoal.run`.
    """
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
                trial = _TrialRank(plan, name, rank, world_size, address, key).run()
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


class _TrialRank:
    """A rank of a trial, in a process of its own."""

    def __init__(
        self, plan: TrialPlan, name: str, rank: int, world_size: int, address: tuple[int, int], key: str
    ) -> None:
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
            self._plan.on_thread(self._run_generations, lambda: self._engine.interrupt(self._generation))
        finally:
            self._engine.close()
        return self._trial

    def _run_generations(self) -> None:
        plan = self._plan
        if self._name == NEWCOMER:
            self._train(restore_from=(plan.directory / "checkpoint").read_text())
        elif self._name == SURVIVOR:
            self._last_step = plan.entered_after
            worker_exit = self._train()
            self._last_step = plan.last_step
            if worker_exit is not None and worker_exit.kind is ExitKind.INTERRUPTED:
                self._train(restore_snapshot=self._find_snapshot(worker_exit))
        else:
            self._train()
            if self._name == UNDISTURBED:
                self._commit_checkpoint()

    def _train(self, **source: Any) -> WorkerExit | None:
        """Train a generation up to `_last_step`. None if it has failed."""
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
            worker_exit = self._engine.run(assignment)
        except Exception as error:
            report = getattr(error, "report", None)
            error_report = report if isinstance(report, ErrorReport) else engine_error(error, Phase.PREPARING)
            self._trial.failed = describe_failure(error_report)
            return None
        self._read_reports()
        # after its last step a rank may fail because the other one has left already
        is_done = self._world_size > 1 and self._last_step in self._trial.tracked
        if worker_exit.error is not None and self._trial.failed is None and not is_done:
            self._trial.failed = describe_failure(worker_exit.error, after=self._describe_entry())
        return worker_exit if self._trial.failed is None else None

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
        """Record a completed step, and end the trial after the last one. The loop calls it."""
        run = self._run
        assert run is not None
        if step == self._plan.last_step:  # other steps are recorded in the next forward pass, as those of a newcomer
            self._record_tracked(run, step)
        if step == self._last_step:
            # wait until the other rank has completed the step too
            run.agree(flag=False)
            if self._world_size > 1:
                self._engine.interrupt(self._generation)

    def settle(self, check: Callable[[], None], note: Callable[[str], None]) -> None:
        """Do nothing before a checkpoint is saved. The loop calls it."""

    def _on_phase(self, phase: Phase, step: int) -> None:
        run, trial = self._run, self._trial
        if run is None or phase not in _RECORDED_PHASES:
            return
        trial.steps_per_epoch, trial.most_workers = run.steps_per_epoch, run.most_workers
        if self._plan.is_silent and not trial.tracked and (reason := _too_large(run)):
            trial.failed = {"message": reason}
            self._engine.interrupt(self._generation)
            return
        if step not in trial.tracked:
            self._record_tracked(run, step)
        if step == self._plan.entered_after and step not in trial.variables:
            directory, objects = Path.cwd(), run.objects
            excluded: dict[int, object] = {id(tracked): tracked for tracked in objects.values()} | {id(run): run}
            variables = variables_of(sys._getframe(), directory, excluded) | variables_in(objects, directory)
            variables |= variables_of_collates(run.collates, directory) | variable_of_gradients(objects)
            trial.variables[step] = {
                name: (variable.file, variable.kind, dict(variable.values)) for name, variable in variables.items()
            }
        if step >= self._last_step:
            self._engine.interrupt(self._generation)

    def _record_tracked(self, run: Run, step: int) -> None:
        """Record the values of the tracked objects after `step` steps."""
        directory, states = Path.cwd(), Tracked(run.objects, run.mesh)

        def values(tracked: Stateful) -> Values:
            state = states.read_state(tracked) if isinstance(tracked, Optimizer) else tracked
            return {path: value for path, value in values_of(state, directory).items() if not path.endswith(_TIMES)}

        self._trial.tracked[step] = {
            name: values(tracked)
            for name, tracked in run.objects.items()
            # Other objects may differ between ranks, such as counters for a log. Their effect on the model is compared.
            if self._name != SPLIT or isinstance(tracked, (torch.nn.Module, Optimizer, LRScheduler))
        }

    def _find_snapshot(self, worker_exit: WorkerExit) -> SnapshotSource:
        assert self._snapshots is not None
        newest = max(worker_exit.snapshot_parts, key=lambda part: (part.step, part.generation))
        server = SnapshotServer(node_id="check", host="127.0.0.1", port=self._snapshots.port)
        return SnapshotSource(
            generation=newest.generation, world_size=newest.world_size, step=newest.step, parts=(server,)
        )

    def _read_reports(self, wait_s: float = 0.0) -> None:
        poll = self._outbox.poll(self._seq, wait_s, self._engine.progress)
        self._seq = poll.seq
        for item in poll.reports:
            if isinstance(item, StepReport):
                numbers = {"loss": item.loss, "grad_norm": item.grad_norm, "lr": item.lr}
                if not self._plan.is_silent and self._name != SPLIT:
                    numbers |= item.metrics
                self._trial.losses[item.step] = {name: number for name, number in numbers.items() if number is not None}
                self._trial.step_s = min(item.step_s, self._trial.step_s or item.step_s)
            elif isinstance(item, SavedPart):
                self._saved.append(item)

    def _commit_checkpoint(self) -> None:
        """Wait for the save in the background, and commit the checkpoint from which the newcomer continues."""
        entered_after, deadline_mono = self._plan.entered_after, time.monotonic() + _SAVED_S
        while not (parts := [part for part in self._saved if part.step == entered_after]):
            if len(self._trial.losses) < entered_after or time.monotonic() > deadline_mono:
                return
            self._read_reports(_POLL_S)
        write_marker(parts[0].directory, marker_of(parts[:1], job_id="check", attempt=1, now=time.time()))
        (self._plan.directory / "checkpoint").write_text(parts[0].directory)


def describe_failure(report: ErrorReport, after: str = "") -> dict[str, Any]:
    """Describe the failure of a trial. `after`: how the function was entered, if not from the beginning."""
    return {**report.model_dump(mode="json"), "sentence": report.sentence, "after": after}


def _too_large(run: Run) -> str:
    """Return why the model is too large for trials; empty if it is not."""
    modules = [tracked for tracked in run.objects.values() if isinstance(tracked, torch.nn.Module)]
    parameters = {id(parameter): parameter for module in modules for parameter in module.parameters()}.values()
    num_parameters = sum(parameter.numel() for parameter in parameters)
    if num_parameters > _MOST_PARAMETERS:
        return f"it has {num_parameters:,} parameters, and up to {_MOST_PARAMETERS:,} are tried"
    needed_bytes, left_bytes = _COPIES * sum(parameter.nbytes for parameter in parameters), available_bytes()
    if needed_bytes <= left_bytes:
        return ""
    return f"a trial needs {needed_bytes >> 20:,} MiB of memory, and {left_bytes >> 20:,} are left"
