"""The events for Shoal, one function each: cause the fault, wait until training has recovered, emit the cost."""

from __future__ import annotations

import random
import signal
import time
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from kit.processes.hosts import Hosts
from kit.processes.os_processes import died_after_s, is_alive, send
from kit.processes.ray_nodes import HEAD, Nodes
from measurements.disturbance import (
    aftermath,
    control,
    is_over,
    longest_gap_s,
    measure,
    measure_switch,
    steady_step_s,
)
from measurements.trial import (
    Emit,
    Event,
    EventFailed,
    System,
    Trial,
    Victim,
    control_trial,
    trial_of,
    with_aftermath,
)
from recovery.cells import Cells
from recovery.shoal.run import ShoalRun
from recovery.workload import GLOBAL_BATCH, WORKERS
from shoal_server import ShoalServer
from shoal_service.views import IncidentView, WorkerView

_RECOVERY_PATIENCE_S = 120.0
_CONTROL_PLANE_DOWN_S = 2.0
_CONTROL_WINDOW_S = 60.0
_QUIET_S = 3.0
"""Seconds to watch for a gap in training after a fault that should not disturb it."""
_PHASES = ("detect_s", "quiesce_s", "plan_s", "form_s", "restore_s", "first_step_s", "recovery_s")


@dataclass(frozen=True, slots=True)
class Arena:
    """A running job, and what is to be done to it."""

    server: ShoalServer
    run: ShoalRun
    cells: Cells
    chance: random.Random
    emit: Emit

    def turns(self, event: Event, victim: Victim | None = None) -> range:
        return range(self.cells.left(System.SHOAL, event, victim))

    def emit_watched(self, trial: Trial, at: float) -> None:
        """Emit the trial with what the window after its signal shows, once the window is over."""
        window_s = self.cells.window_s
        if window_s and not trial.failed:
            self.run.watch_until(at + window_s)
            trial = with_aftermath(trial, aftermath(self.run.steps(), at, window_s), GLOBAL_BATCH)
        self.emit(trial)


def watch_undisturbed(arena: Arena) -> None:
    """The control: windows of the same length without a fault."""
    window_s = arena.cells.window_s or _CONTROL_WINDOW_S
    for _ in arena.turns(Event.CONTROL):
        arena.run.wait_for_random_moment(arena.chance, WORKERS)
        since = time.time()
        arena.run.watch_until(since + window_s)
        found = control(arena.run.steps(), since, window_s)
        arena.emit(control_trial(System.SHOAL, found, window_s, GLOBAL_BATCH))


def kill_workers(arena: Arena, *, standbys: int = 0) -> None:
    event = Event.WORKER_KILL_STANDBY if standbys else Event.WORKER_KILL
    for _ in arena.turns(event):
        arena.run.wait_for_random_moment(arena.chance, WORKERS, standbys)
        victim = arena.chance.choice(arena.run.workers())
        at = send(victim.pid, signal.SIGKILL)
        arena.emit_watched(_observe(arena.run, event, at), at)


def stop_workers(arena: Arena) -> None:
    run = arena.run
    for _ in arena.turns(Event.WORKER_STOP):
        run.wait_for_random_moment(arena.chance, WORKERS)
        victim = arena.chance.choice(run.workers())
        at = send(victim.pid, signal.SIGSTOP)
        trial = _observe(run, Event.WORKER_STOP, at)
        if is_alive(victim.pid):
            trial.figures["stopped_worker_alive"] = True
            send(victim.pid, signal.SIGKILL)
        arena.emit_watched(trial, at)


def kill_raylets(arena: Arena) -> None:
    """Kills raylets. After each kill a new node starts at the same address, which is the event `capacity`; the control
    plane starts a killed head again."""
    nodes, run = arena.server.nodes, arena.run
    for place in arena.cells.victims:
        for _ in arena.turns(Event.RAYLET_KILL, place):
            run.wait_for_random_moment(arena.chance, WORKERS)
            victim = _worker_at(place, nodes, run, arena.chance)
            at = nodes.kill_raylet(victim.node_ip)
            died_s = died_after_s(victim.pid, at, _RECOVERY_PATIENCE_S)
            trial = replace(_observe(run, Event.RAYLET_KILL, at, {"processes_died_s": died_s}), victim=place)
            if victim.node_ip == HEAD:
                run.must(nodes.is_head_alive, "the head runs again")
                arena.emit_watched(trial, at)
                continue
            nodes.remove(victim.node_ip)
            joined_at = nodes.add(victim.node_ip, num_cpus=1)
            grown = _observe_switch(run, Event.CAPACITY, joined_at, WORKERS)
            arena.emit_watched(trial, at)
            arena.emit(grown)


def shrink(arena: Arena) -> None:
    for _ in arena.turns(Event.SHRINK):
        arena.run.wait_for_random_moment(arena.chance, WORKERS)
        asked_at = time.time()
        arena.run.client.scale(arena.run.id, max_workers=WORKERS - 1)
        arena.emit(_observe_switch(arena.run, Event.SHRINK, asked_at, WORKERS - 1))
        arena.run.client.scale(arena.run.id, max_workers=WORKERS)


def drain_nodes(arena: Arena) -> None:
    """Drains nodes. No other node has a free CPU, so the group shrinks. Then the drain is undone, and the group
    grows."""
    run = arena.run
    for _ in arena.turns(Event.DRAIN):
        run.wait_for_random_moment(arena.chance, WORKERS)
        victim = arena.chance.choice(run.workers())
        asked_at = time.time()
        run.client.drain(victim.node_id, reason="recovery benchmark")
        arena.emit(_observe_switch(run, Event.DRAIN, asked_at, WORKERS - 1))
        run.client.undo_drain(victim.node_id)


def kill_head(arena: Arena) -> None:
    """Kills the head, which the control plane restarts."""
    nodes, run = arena.server.nodes, arena.run
    for _ in arena.turns(Event.HEAD_KILL):
        run.wait_for_random_moment(arena.chance, WORKERS)
        before = [one.pid for one in run.workers()]
        at = nodes.kill_head()
        run.must(nodes.is_head_alive, "the head runs again")
        run.must(lambda: run.client.cluster().connected, "the control plane is connected again")
        back_at = time.time()
        run.must(lambda: _has_steps_since(run, back_at), "new steps are reported")  # noqa: B023
        trial = _undisturbed(run, Event.HEAD_KILL, at, before)
        trial.figures["head_back_s"] = round(back_at - at, 3)
        arena.emit(trial)


def cut_hosts(hosts: Hosts, arena: Arena) -> None:
    """Cuts hosts off. The host's processes keep running without a network; they are examined once its link is up again.
    The head has its own host without workers, so `head` is not a place for a victim."""
    run = arena.run
    for place in arena.cells.victims:
        for _ in arena.turns(Event.HOST_CUT, place) if place is not Victim.HEAD else ():
            run.wait_for_random_moment(arena.chance, WORKERS)
            supervisors = set(hosts.pids_of("SupervisorActor").values())
            victim = arena.chance.choice(_placed(run.workers(), place, supervisors, set()))
            at = hosts.cut(victim.node_ip)
            trial = replace(_observe(run, Event.HOST_CUT, at), victim=place)
            trial.figures["isolated_worker_alive"] = is_alive(victim.pid)
            hosts.heal(victim.node_ip)
            died_s = died_after_s(victim.pid, time.time(), 60.0)
            trial.figures["isolated_worker_gone_s"] = None if died_s is None else round(died_s, 2)
            arena.emit_watched(trial, at)
            hosts.launch(victim.node_ip)


def kill_supervisor(arena: Arena) -> None:
    nodes, run = arena.server.nodes, arena.run
    for _ in arena.turns(Event.SUPERVISOR_KILL):
        run.wait_for_random_moment(arena.chance, WORKERS)
        before = [one.pid for one in run.workers()]
        [supervisor] = nodes.pids_of("SupervisorActor")
        at = send(supervisor, signal.SIGKILL)
        time.sleep(_QUIET_S)
        run.must(lambda: _has_steps_since(run, at + _QUIET_S), "the supervisor reports again")  # noqa: B023
        arena.emit(_undisturbed(run, Event.SUPERVISOR_KILL, at, before))


def kill_control_plane(arena: Arena) -> None:
    server, run = arena.server, arena.run
    for _ in arena.turns(Event.CONTROL_PLANE_KILL):
        run.wait_for_random_moment(arena.chance, WORKERS)
        before = [one.pid for one in run.workers()]
        at = server.kill()
        time.sleep(_CONTROL_PLANE_DOWN_S)
        server.listen()
        run.must(lambda: _has_steps_since(run, server.started_at), "the control plane has new steps")
        reported_at = time.time()
        trial = _undisturbed(run, Event.CONTROL_PLANE_KILL, at, before)
        trial.figures["reattached_s"] = round(reported_at - server.listening_at, 3)
        trial.figures["started_and_reattached_s"] = round(reported_at - server.started_at, 3)
        arena.emit(trial)


def _observe(run: ShoalRun, event: Event, at: float, figures: dict[str, Any] | None = None) -> Trial:
    if not run.wait(lambda: is_over(run.steps(), at), f"it recovers from {event}", _RECOVERY_PATIENCE_S):
        return Trial(System.SHOAL, event, note=f"no recovery within {_RECOVERY_PATIENCE_S:.0f} s")
    cost = measure(run.steps(), at, run.quiet_step_s)
    run.wait(lambda: run.incident_after(at) is not None, "the incident is closed", 10.0)
    pace = {"snapshot_every_steps": run.client.job(run.id).status.snapshot_every_steps}
    return trial_of(System.SHOAL, event, cost, pace | (figures or {}) | _of_incident(run.incident_after(at), at))


def _observe_switch(run: ShoalRun, event: Event, asked_at: float, workers: int) -> Trial:
    def is_known() -> bool:
        cost = measure_switch(run.steps(), asked_at, workers)
        return cost is not None and is_over(run.steps(), asked_at + cost.regain_s - 1e-6)

    if not run.wait(is_known, f"{event}: {workers} workers", _RECOVERY_PATIENCE_S):
        return Trial(System.SHOAL, event, note=f"not at {workers} workers within {_RECOVERY_PATIENCE_S:.0f} s")
    cost = measure_switch(run.steps(), asked_at, workers)
    assert cost is not None
    return trial_of(System.SHOAL, event, cost)


def _undisturbed(run: ShoalRun, event: Event, at: float, pids: list[int]) -> Trial:
    """The longest gap between steps, minus a median step, for faults that must not disturb training."""
    steps = run.steps()
    before = [one for one in steps if one.at <= at]
    since = [before[-1], *(one for one in steps if one.at > at)]
    step_s = steady_step_s(steps, before[-1])
    longest_s = longest_gap_s(steps, before[-1].at, steps[-1].at)
    return Trial(
        System.SHOAL,
        event,
        next_step_s=longest_s,
        pause_s=max(0.0, longest_s - step_s),
        steps_lost=sum(b.step <= a.step for a, b in pairwise(since)),
        from_workers=before[-1].world_size,
        to_workers=steps[-1].world_size,
        step_s=step_s,
        figures={"same_pids": [one.pid for one in run.workers()] == pids},
    )


def _of_incident(incident: IncidentView | None, at: float) -> dict[str, Any]:
    """The phases of the incident as the service recorded them, and the time from the signal until it noticed."""
    if incident is None:
        return {"incident": "no incident was closed"}
    figures: dict[str, Any] = {"cause": str(incident.cause), "witness": incident.witness, "action": incident.action}
    figures |= {name: getattr(incident, name) for name in _PHASES}
    figures |= {
        "noticed_s": round(incident.at - at, 4),
        "state_source": incident.state_source,
        "bytes_moved": incident.bytes_moved,
    }
    return {key: value for key, value in figures.items() if value not in (None, "")}


def _has_steps_since(run: ShoalRun, at: float) -> bool:
    steps = run.steps()
    return bool(steps) and steps[-1].at > at


def _worker_at(place: Victim, nodes: Nodes, run: ShoalRun, chance: random.Random) -> WorkerView:
    supervisors = {ip for pid in nodes.pids_of("SupervisorActor") if (ip := nodes.ip_of(pid))}
    return chance.choice(_placed(run.workers(), place, supervisors, {HEAD}))


def _placed(workers: list[WorkerView], place: Victim, supervisors: set[str], heads: set[str]) -> list[WorkerView]:
    """The workers whose node is the supervisor's, the head's, or neither."""
    if place is Victim.AWAY:
        found = [one for one in workers if one.node_ip not in supervisors | heads]
    else:
        found = [one for one in workers if one.node_ip in (supervisors if place is Victim.SUPERVISOR else heads)]
    if not found:
        raise EventFailed(f"no worker runs on a node for the victim {place}: {[one.node_ip for one in workers]}")
    return found
