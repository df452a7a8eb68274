"""One run of a peer: its processes train and write stamps; the benchmark causes faults and reads the stamps.

Called by ray_train.py and torchrun.py.
"""

from __future__ import annotations

import random
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from kit.processes.os_processes import died_after_s, end_tree, is_alive, send
from kit.processes.ray_nodes import Nodes
from measurements.disturbance import aftermath, control, is_over, measure, measure_switch, steady_step_s
from measurements.stamps import StepEnd, WorkerStart, read_stamps
from measurements.trial import (
    Emit,
    Event,
    EventFailed,
    Size,
    System,
    Trial,
    Victim,
    control_trial,
    trial_of,
    with_aftermath,
)
from recovery.cells import Cells
from recovery.workload import CHECKPOINT_EVERY_STEPS, GLOBAL_BATCH, workload

_STEPS = 1_000_000
"""More than any run reaches: the benchmark ends the run."""
_LOOK_S = 0.05
_PATIENCE_S = 240.0
_CONTROL_WINDOW_S = 60.0
_HANG_PATIENCE_S = 40.0
"""Neither peer detects a hang before the collective's timeout of half an hour."""


@dataclass
class PeerRun:
    """One run of a peer from its start to its end; `folder` holds spec, stamps and logs."""

    system: System
    folder: Path
    process: subprocess.Popen[bytes]

    def steps(self) -> list[StepEnd]:
        return read_stamps(self.folder)[0]

    def group(self) -> list[WorkerStart]:
        """The live training processes."""
        starts = read_stamps(self.folder)[1]
        return [one for one in starts if is_alive(one.pid)]

    def wait(self, condition: Callable[[], bool], what: str, timeout_s: float = _PATIENCE_S) -> bool:
        """Whether the condition came true within the time."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if self.process.poll() is not None:
                raise EventFailed(f"{self.system} ended before {what}:\n{self.log_tail()}")
            if time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_S)
        return True

    def log_tail(self) -> str:
        return (self.folder / "driver.log").read_text(errors="replace")[-3000:]

    def wait_for_random_moment(self, chance: random.Random) -> None:
        """Return at a random step of the checkpoint cycle and a random point within it, after a few undisturbed
        steps."""
        steps = self.steps()
        target = (steps[-1].step if steps else 0) + chance.randint(4, 3 + CHECKPOINT_EVERY_STEPS)
        if not self.wait(lambda: bool(now := self.steps()) and now[-1].step >= target, f"step {target}"):
            raise EventFailed(f"{self.system} does not reach step {target}:\n{self.log_tail()}")
        steps = self.steps()
        time.sleep(chance.random() * steady_step_s(steps, steps[-1]))

    def end(self) -> None:
        """Kill the whole process tree: torchrun gives each worker its own session."""
        end_tree(self.process.pid)


def start_peer(system: System, folder: Path, params: Size, command: list[str], environment: dict[str, str]) -> PeerRun:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "spec.yaml").write_text(yaml.safe_dump(workload(steps=_STEPS, params=params)))
    with (folder / "driver.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=environment
        )
    return PeerRun(system, folder, process)


def strike_in_turn(run: PeerRun, remaining: list[Event], cells: Cells, chance: random.Random, emit: Emit) -> None:
    """Cause the events that hit processes; each is removed from `remaining` when it is done."""
    while remaining:
        num_trials = cells.left(run.system, remaining[0])
        match remaining[0]:
            case Event.CONTROL:
                watch_undisturbed(run, num_trials, cells.window_s, chance, emit)
            case Event.WORKER_KILL:
                kill_workers(run, num_trials, cells.window_s, chance, emit)
            case Event.WORKER_STOP:
                stop_workers(run, num_trials, chance, emit)
            case event:
                raise AssertionError(f"{event} does not hit a process")
        remaining.pop(0)


def watch_undisturbed(run: PeerRun, num_trials: int, window_s: float, chance: random.Random, emit: Emit) -> None:
    """The control: windows of the same length without a fault."""
    window_s = window_s or _CONTROL_WINDOW_S
    for _ in range(num_trials):
        run.wait_for_random_moment(chance)
        since = time.time()
        run.wait(lambda: time.time() >= since + window_s, "the end of the window", 2 * window_s)  # noqa: B023
        emit(control_trial(run.system, control(run.steps(), since, window_s), window_s, GLOBAL_BATCH))


def kill_workers(run: PeerRun, num_trials: int, window_s: float, chance: random.Random, emit: Emit) -> None:
    for _ in range(num_trials):
        run.wait_for_random_moment(chance)
        victim = chance.choice(run.group())
        at = send(victim.pid, signal.SIGKILL)
        emit_watched(run, _observe(run, Event.WORKER_KILL, at), at, window_s, emit)


def stop_workers(run: PeerRun, num_trials: int, chance: random.Random, emit: Emit) -> None:
    """Wait for a recovery for _HANG_PATIENCE_S, then continue the process so that the run can go on."""
    for _ in range(num_trials):
        run.wait_for_random_moment(chance)
        victim = chance.choice(run.group())
        at = send(victim.pid, signal.SIGSTOP)
        trial = _observe(run, Event.WORKER_STOP, at, _HANG_PATIENCE_S)
        send(victim.pid, signal.SIGCONT)
        emit(trial)


def kill_raylet(run: PeerRun, nodes: Nodes, ip: str, victim: WorkerStart) -> tuple[Trial, float]:
    """Kills a raylet. Returns the trial, and the time of the signal."""
    at = nodes.kill_raylet(ip)
    died_s = died_after_s(victim.pid, at, _PATIENCE_S)
    trial = _observe(run, Event.RAYLET_KILL, at, figures={"processes_died_s": died_s})
    return replace(trial, victim=Victim.AWAY), at


def emit_watched(run: PeerRun, trial: Trial, at: float, window_s: float, emit: Emit) -> None:
    """Emit the trial with what the window after its signal shows, once the window is over."""
    if window_s:
        run.wait(lambda: time.time() >= at + window_s, "the end of the window", window_s + _PATIENCE_S)
        trial = with_aftermath(trial, aftermath(run.steps(), at, window_s), GLOBAL_BATCH)
    emit(trial)


def wait_for_growth(run: PeerRun, joined_at: float, workers: int, emit: Emit) -> None:
    """Measure from the time at which the node was up until training continues at the larger size."""

    def switched() -> bool:
        cost = measure_switch(run.steps(), joined_at, workers)
        return cost is not None and is_over(run.steps(), joined_at + cost.regain_s - 1e-6)

    if not run.wait(switched, "it grows"):
        emit(Trial(run.system, Event.CAPACITY, note=f"did not grow within {_PATIENCE_S:.0f} s"))
        return
    cost = measure_switch(run.steps(), joined_at, workers)
    assert cost is not None
    emit(trial_of(run.system, Event.CAPACITY, cost))


def _observe(
    run: PeerRun,
    event: Event,
    at: float,
    patience_s: float = _PATIENCE_S,
    figures: dict[str, Any] | None = None,
) -> Trial:
    before = run.steps()
    if not run.wait(lambda: is_over(run.steps(), at), f"it recovers from {event}", patience_s):
        size = before[-1].world_size if before else None
        return Trial(run.system, event, from_workers=size, note=f"no recovery within {patience_s:.0f} s")
    return trial_of(run.system, event, measure(run.steps(), at), figures)
