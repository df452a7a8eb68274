"""`python -m shoal_workers.check_loop`: tries a loop on one machine, to find what it does not track.

    file        runs up to shoal.run(train), once; each trial is a fork of what it leaves
    undisturbed four steps; and again: what differs between these two is not the same in any two runs
    newcomer    another process enters after step 2, with what is tracked, as a worker does that joins
    survivor    is interrupted in the third step, as by a lost worker, and calls the function again
    ... and the first three once more, if an epoch is short: with the newcomer at its end, where callbacks are called

It is the engine that trains, as a group of one rank, with two micro-batches of each step. Losses and tracked state of
all trials have to be equal. If not, the variables that have another value when a trial enters the function anew than
they had in the undisturbed run are what is not tracked.

Standard input is the spec as JSON, the working directory that of the code; the argument is an empty directory, where
all of Shoal's files are. Each line of standard output is a JSON object: {"phase": ...} when a trial begins, and at last
{"found": ...} or {"failed": ...}. Called by `shoal check`.
"""

from __future__ import annotations

import ast
import faulthandler
import importlib
import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from shoal_workers.checkpoint.commit import marker_of, write_marker
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.layout import replicated
from shoal_workers.contract.messages import Assignment, ErrorReport, ExitKind, Phase, WorkerExit
from shoal_workers.contract.snapshots import SnapshotServer, SnapshotSource
from shoal_workers.contract.spec import JobSpec
from shoal_workers.contract.worker_reports import SavedPart, StepReport
from shoal_workers.engine.engine import Engine
from shoal_workers.engine.generation_ends import TaskFailed
from shoal_workers.engine.group.store.server import StoreServer
from shoal_workers.engine.loop.entry import function_of
from shoal_workers.engine.loop.run import Run
from shoal_workers.engine.loop.variables import Difference, difference, is_below, values_of, variables_of
from shoal_workers.engine.process.engine_error import engine_error
from shoal_workers.engine.process.outbox import Outbox
from shoal_workers.engine.process.packages import add_packages
from shoal_workers.engine.task.randomness import seed_everything
from shoal_workers.engine.task.user_code import report_of
from shoal_workers.snapshot_store.store import SnapshotStore
from shoal_workers.training_thread import on_training_thread

ENTERED_AFTER, _STEPS_AFTER = 2, 2
_LONGEST_EPOCH, _LONGEST_EPOCH_S = 64, 20.0
_MOST_MICRO_BATCHES = 2
_TIMES = ("_runtime", "_per_second")
"""What a trainer logs of its own speed, in its history."""
_SAVED_S = 30.0
_POLL_S = 0.05
_LOOKED_AT = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
_UNDISTURBED, _REPEATED, _NEWCOMER, _SURVIVOR = "undisturbed", "repeated", "newcomer", "survivor"
_WHAT = {_NEWCOMER: "a worker that joins after step {}", _SURVIVOR: "a worker whose group breaks after step {}"}


@dataclass
class Trial:
    """What one trial has shown."""

    losses: dict[int, dict[str, float]] = field(default_factory=dict)
    """Loss, gradient norm, learning rate and metrics by step."""
    tracked: dict[int, dict[str, dict[str, Any]]] = field(default_factory=dict)
    """Values of each tracked object, by completed steps."""
    variables: dict[int, dict[str, tuple[str, str, dict[str, Any]]]] = field(default_factory=dict)
    """Place, kind and values of each variable, by completed steps."""
    step_s: float = 0.0
    entered_after: int = ENTERED_AFTER
    steps_per_epoch: int | None = None
    most_workers: int | None = None
    """Among how many its data can be divided."""
    failed: dict[str, Any] | None = None


def main() -> int:
    """Exit status 1 if the loop fails, or does not track all of its state."""
    faulthandler.enable()
    directory = Path(sys.argv[1]).absolute()
    spec = _reduced(parse_spec(json.load(sys.stdin)), directory)
    lines, sys.stdout = sys.stdout, sys.stderr  # what the loop prints does not belong to the answer
    torch.set_num_threads(1)  # the threads of a parallel region do not survive a fork
    importlib.import_module("torch._dynamo")  # the first optimizer would, in each trial

    def say(document: dict[str, Any]) -> None:
        lines.write(json.dumps(document) + "\n")
        lines.flush()

    say({"phase": "the file up to shoal.run", "note": ""})
    try:
        function = on_training_thread(lambda: _function_of(spec), lambda: None)
    except TaskFailed as error:
        say({"failed": _failed(error.report)})
        return 1
    findings: dict[str, Any] = {}
    entered_after: int | None = ENTERED_AFTER
    names: tuple[str, ...] = (_UNDISTURBED, _REPEATED, _NEWCOMER, _SURVIVOR)
    while entered_after is not None:
        spec = _entered(spec, entered_after)
        trials: dict[str, Trial] = {}
        folder = directory / f"after-{entered_after}"
        folder.mkdir()
        for name in names:
            say({"phase": f"the {name} trial", "note": ""})
            trial = _Try(name, spec, function, folder, entered_after).run
            trials[name] = _in_a_fork(trial, folder / name)
            if trials[name].failed is not None:
                say({"failed": trials[name].failed})
                return 1
            if len(trials[_UNDISTURBED].losses) < entered_after + 1:
                break  # it is too short to be interrupted
        whole = trials[_UNDISTURBED]
        if not findings or len(whole.losses) > entered_after:
            findings = verdict(trials, Path.cwd())
        entered_after = _end_of_epoch(whole) if findings["is_whole"] and len(names) == 4 else None
        names = names[:3]
    say({"found": findings})
    return 0 if findings["is_whole"] else 1


def _end_of_epoch(whole: Trial) -> int | None:
    """The step that ends the first epoch, if it can be reached soon."""
    steps = whole.steps_per_epoch
    if steps is None or not ENTERED_AFTER < steps <= _LONGEST_EPOCH:
        return None
    return steps if 3 * steps * whole.step_s < _LONGEST_EPOCH_S else None


def _function_of(spec: JobSpec) -> Callable[[Run], None]:
    assert spec.loop is not None
    seed_everything(spec.seed)
    add_packages(spec.code, lambda text: None)
    try:
        return function_of(spec.loop)
    except (Exception, SystemExit) as error:
        raise TaskFailed(report_of(error, Phase.PREPARING, in_task_call=True)) from None


def _entered(spec: JobSpec, entered_after: int) -> JobSpec:
    """The same with a checkpoint after that step."""
    checkpoint = spec.checkpoint.model_copy(update={"every_steps": entered_after})
    return spec.model_copy(update={"checkpoint": checkpoint})


def _reduced(spec: JobSpec, directory: Path) -> JobSpec:
    """Returns the same loop with a copy after each step, on one rank."""
    has_gpu = bool(spec.worker.gpus) and torch.cuda.is_available()
    return spec.model_copy(
        update={
            "worker": spec.worker if has_gpu else spec.worker.model_copy(update={"gpus": 0}),
            "checkpoint": spec.checkpoint.model_copy(update={"every_s": None, "url": str(directory)}),
            "snapshot": spec.snapshot.model_copy(update={"enabled": True, "budget": 1.0}),
        }
    )


def _in_a_fork(function: Callable[[], Trial], file: Path) -> Trial:
    """Each trial begins with the variables that the file has left. Main thread, while there is no other."""
    path = file.with_suffix(".trial")
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            torch.save(vars(function()), path)
            status = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stderr.flush()
            os._exit(status)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code < 0:
        os.kill(os.getpid(), -code)  # `shoal check` says how the program has crashed
    if code:
        raise SystemExit(code)
    return Trial(**torch.load(path))


class _Try:
    """One trial, in a process of its own."""

    def __init__(
        self, name: str, spec: JobSpec, function: Callable[[Run], None], directory: Path, entered_after: int
    ) -> None:
        self._name = name
        self._entered_after = entered_after
        self._spec = spec
        self._function = function
        self._directory = directory
        self._trial = Trial(entered_after=entered_after)
        self._run: Run | None = None
        self._outbox = Outbox("check")
        self._seq = 0
        self._saved: list[SavedPart] = []
        self._store = StoreServer("127.0.0.1", secrets.token_hex(16))
        memory = directory / f"{name}-memory"
        memory.mkdir()
        self._snapshots = SnapshotStore(
            job_id="check", attempt=1, worker_id="check", node_id="check", key=secrets.token_hex(16), root=memory
        )
        self._root = str(directory / f"{name}-checkpoints")
        self._engine = Engine(
            spec,
            checkpoint_root=self._root,
            outbox=self._outbox,
            store=self._store,
            snapshot_store=self._snapshots,
            on_phase=self._on_phase,
            loop=self._loop,
        )
        self._generation = 0
        self._last_step = entered_after + _STEPS_AFTER

    def run(self) -> Trial:
        try:
            on_training_thread(self._tries, lambda: self._engine.interrupt(self._generation))
        finally:
            self._engine.close()
        return self._trial

    def _tries(self) -> None:
        if self._name == _NEWCOMER:
            self._train(restore_from=(self._directory / "checkpoint").read_text())
        elif self._name == _SURVIVOR:
            self._last_step = self._entered_after
            ended = self._train()
            self._last_step = self._entered_after + _STEPS_AFTER
            if ended is not None and ended.kind is ExitKind.INTERRUPTED:
                self._train(restore_snapshot=self._in_memory(ended))
        else:
            self._train()
            if self._name == _UNDISTURBED:
                self._commit()

    def _train(self, **source: Any) -> WorkerExit | None:
        """One generation. None if it has failed."""
        self._generation += 1
        assignment = Assignment(
            job_id="check",
            attempt=1,
            generation=self._generation,
            rank=0,
            layout=replicated(1),
            store_host=self._store.host,
            store_port=self._store.port,
            **{"restore_from": None, **source},
        )
        try:
            ended = self._engine.run(assignment)
        except Exception as error:
            report = getattr(error, "report", None)
            error_report = report if isinstance(report, ErrorReport) else engine_error(error, Phase.PREPARING)
            self._trial.failed = _failed(error_report)
            return None
        self._read_reports()
        if ended.error is not None:
            self._trial.failed = _failed(ended.error, after=self._entered_words())
            return None
        return ended

    def _entered_words(self) -> str:
        if self._name == _NEWCOMER or self._generation == 2:
            return f"entered again after step {self._entered_after}"
        return ""

    def _loop(self, run: Run) -> None:
        run.most_micro_batches = _MOST_MICRO_BATCHES
        self._run = run
        self._function(run)

    def _on_phase(self, phase: Phase, step: int) -> None:
        run = self._run
        if run is None or phase not in _LOOKED_AT:
            return
        self._trial.steps_per_epoch, self._trial.most_workers = run.steps_per_epoch, run.most_workers
        if step not in self._trial.tracked:
            self._look(run, step)
        if step >= self._last_step:
            self._engine.interrupt(self._generation)

    def _look(self, run: Run, step: int) -> None:
        directory = Path.cwd()
        objects = run.objects
        self._trial.tracked[step] = {
            name: {path: value for path, value in values_of(tracked, directory).items() if not path.endswith(_TIMES)}
            for name, tracked in objects.items()
        }
        left_out: dict[int, object] = {id(tracked): tracked for tracked in objects.values()} | {id(run): run}
        variables = variables_of(sys._getframe(), directory, left_out)
        self._trial.variables[step] = {
            name: (changed_value.place, changed_value.kind, dict(changed_value.values))
            for name, changed_value in variables.items()
        }

    def _in_memory(self, ended: WorkerExit) -> SnapshotSource:
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
                numbers = {"loss": item.loss, "grad_norm": item.grad_norm, "lr": item.lr, **item.metrics}
                self._trial.losses[item.step] = {name: number for name, number in numbers.items() if number is not None}
                self._trial.step_s = item.step_s
            elif isinstance(item, SavedPart):
                self._saved.append(item)

    def _commit(self) -> None:
        """The checkpoint from which the newcomer goes on. It is written in the background."""
        deadline_mono = time.monotonic() + _SAVED_S
        while not (parts := [part for part in self._saved if part.step == self._entered_after]):
            if len(self._trial.losses) < self._entered_after or time.monotonic() > deadline_mono:
                return
            poll = self._outbox.poll(self._seq, _POLL_S, lambda: self._engine.progress)
            self._seq = poll.seq
            self._saved += [item for item in poll.reports if isinstance(item, SavedPart)]
        write_marker(parts[0].directory, marker_of(parts[:1], job_id="check", attempt=1, now=time.time()))
        (self._directory / "checkpoint").write_text(parts[0].directory)


def _failed(report: ErrorReport, after: str = "") -> dict[str, Any]:
    return {**report.model_dump(mode="json"), "sentence": report.sentence, "after": after}


def verdict(trials: Mapping[str, Trial], directory: Path) -> dict[str, Any]:
    """Compares the trials; what is said to the user. A function of the trials, and of the program's text."""
    whole, again = trials[_UNDISTURBED], trials.get(_REPEATED)
    entered_after = whole.entered_after
    findings: dict[str, Any] = {
        "steps": len(whole.losses),
        "losses": [loss.get("loss") for loss in whole.losses.values()],
        "tracked": sorted(whole.tracked[max(whole.tracked)]) if whole.tracked else [],
        "step_s": whole.step_s,
        "most_workers": whole.most_workers,
        "is_whole": True,
        "differences": [],
        "untracked": [],
        "suspects": [],
        "remarks": [],
    }
    if _NEWCOMER not in trials:
        findings["remarks"].append(
            f"the loop has ended after {len(whole.losses)} steps, and it takes {entered_after + 1} to interrupt it: "
            "what it tracks was not compared"
        )
        return findings
    assert again is not None
    if (first := _first_difference(whole, again)) is not None:
        findings["is_whole"] = False
        findings["differences"].append({"trial": "two undisturbed runs from the beginning", **first})
        findings["remarks"].append(
            "the loop is not the same twice, so what it does not track cannot be found. Usual causes: random numbers "
            "that are drawn without a seed, the time, the order of a set or of files"
        )
        return findings
    noise = _changed(whole, again)
    untracked: dict[str, dict[str, Any]] = {}
    for name in (_NEWCOMER, _SURVIVOR):
        if (trial := trials.get(name)) is None:
            continue
        sentence = _WHAT[name].format(entered_after)
        if (first := _first_difference(whole, trial)) is not None:
            findings["differences"].append({"trial": sentence, **first})
        for variable, change in _changed(whole, trial).items():
            if variable not in noise:
                untracked.setdefault(variable, {**change, "trial": sentence})
    has_differences = bool(findings["differences"])
    states = {name: reason for name, reason in untracked.items() if reason["kind"] == "state"}
    findings["untracked"] = [*states.values()]
    if has_differences:
        findings["untracked"] += [reason for reason in untracked.values() if reason["kind"] != "state"]
    findings["is_whole"] = not has_differences and not states
    if has_differences:
        findings["suspects"] = list(_iterators(whole, directory))
    elif plain := [f"{reason['name']} ({reason['place']})" for name, reason in untracked.items() if name not in states]:
        findings["remarks"].append(
            f"not tracked, and begin anew when the function is called again, without a change of the training: "
            f"{', '.join(plain)}"
        )
    return findings


def _first_difference(whole: Trial, trial: Trial) -> dict[str, Any] | None:
    """The first step with another loss or tracked state, and what differs there."""
    for step in range(1, whole.entered_after + _STEPS_AFTER + 1):
        before, after = whole.losses.get(step), trial.losses.get(step)
        if before is not None and after is not None:
            changed = [
                (name, difference({name: before[name]}, {name: after[name]})) for name in before if name in after
            ]
            for name, variable in changed:
                if variable is not None:
                    return {"step": step, "what": name, "words": variable.words}
        states, others = whole.tracked.get(step, {}), trial.tracked.get(step, {})
        for name in states:
            if name in others and (mismatch := difference(states[name], others[name])) is not None:
                is_entry = step == whole.entered_after and trial.losses.keys() != whole.losses.keys()
                message = f"{mismatch.words}, right after its load_state_dict()" if is_entry else mismatch.words
                return {"step": step, "what": f"{name}.{mismatch.path}".rstrip("."), "words": message}
    return None


def _changed(whole: Trial, trial: Trial) -> dict[str, dict[str, Any]]:
    """Variables that have another value when the function was entered after step 2 than in the undisturbed run."""
    changed: dict[str, dict[str, Any]] = {}
    entered = whole.entered_after
    before, after = whole.variables.get(entered, {}), trial.variables.get(entered, {})
    for name in before.keys() & after.keys():
        place, kind, values = before[name]
        mismatch: Difference | None = difference(values, after[name][2])
        if mismatch is not None:
            path = f"{name}.{mismatch.path}" if mismatch.path else name
            changed[name] = {"name": name, "path": path, "place": place, "kind": kind, "words": mismatch.words}
    return changed


def _iterators(whole: Trial, directory: Path) -> Iterator[str]:
    """Iterators whose position is not known to Shoal, and lines that make loaders."""
    seen = set()
    for name, (place, kind, _) in whole.variables.get(whole.entered_after, {}).items():
        if kind == "iterator":
            seen.add(place)
            yield f"{name}, an iterator ({place})"
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and is_below(Path(file), directory):
            for place in _loader_lines(Path(file)):
                if place not in seen:
                    seen.add(place)
                    yield f"a loader ({place})"


def _loader_lines(file: Path) -> Iterator[str]:
    """Where DataLoaders and iterators are made that are no argument of `run.batches`."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    given = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr.endswith("batches")
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and id(node) not in given:
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            if name == "iter" or name.endswith("DataLoader"):
                yield f"{file.name}:{node.lineno}"


if __name__ == "__main__":
    sys.exit(main())
