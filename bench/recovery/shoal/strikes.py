"""The events for Shoal, one function each: cause the fault, wait until training has recovered, emit the cost."""

from __future__ import annotations

import random
import signal
import time
from itertools import pairwise
from typing import Any

from kit.processes.os_processes import died_after_s, is_alive, send
from kit.processes.ray_nodes import HEAD, Nodes
from measurements.disturbance import is_over, longest_gap_s, measure, measure_switch, steady_step_s
from measurements.trial import Emit, Event, System, Trial, trial_of
from recovery.shoal.hosts import Hosts
from recovery.shoal.run import ShoalRun
from recovery.workload import WORKERS
from shoal_server import ShoalServer
from shoal_service.views import IncidentView, WorkerView

_RECOVERY_PATIENCE_S = 120.0
_CONTROL_PLANE_DOWN_S = 2.0
_QUIET_S = 3.0
"""Seconds to watch for a gap in training after a fault that should not disturb it."""
_PHASES = ("detect_s", "quiesce_s", "plan_s", "form_s", "restore_s", "first_step_s", "recovery_s")


def kill_workers(run: ShoalRun, kills: int, chance: random.Random, emit: Emit, *, standbys: int = 0) -> None:
    event = Event.WORKER_KILL_STANDBY if standbys else Event.WORKER_KILL
    for _ in range(kills):
        run.wait_for_random_moment(chance, WORKERS, standbys)
        victim = chance.choice(run.workers())
        emit(_observe(run, event, send(victim.pid, signal.SIGKILL)))


def stop_workers(
    run: ShoalRun, kills: int, chance: random.Random, emit: Emit, *, factor: float, floor_s: float
) -> None:
    for _ in range(kills):
        run.wait_for_random_moment(chance, WORKERS)
        steps = run.steps()
        threshold_s = max(factor * steady_step_s(steps, steps[-1]), floor_s)
        victim = chance.choice(run.workers())
        at = send(victim.pid, signal.SIGSTOP)
        trial = _observe(run, Event.WORKER_STOP, at, {"threshold_s": round(threshold_s, 2)})
        if is_alive(victim.pid):
            trial.figures["stopped_worker_alive"] = True
            send(victim.pid, signal.SIGKILL)
        emit(trial)


def kill_raylets(nodes: Nodes, run: ShoalRun, kills: int, chance: random.Random, emit: Emit) -> None:
    """After each kill a new node starts at the same address, which is the event `capacity`."""
    for _ in range(kills):
        run.wait_for_random_moment(chance, WORKERS)
        victim = _worker_away_from_supervisor(nodes, run, chance)
        at = nodes.kill_raylet(victim.node_ip)
        died_s = died_after_s(victim.pid, at, _RECOVERY_PATIENCE_S)
        emit(_observe(run, Event.RAYLET_KILL, at, {"processes_died_s": died_s}))
        nodes.remove(victim.node_ip)
        joined_at = nodes.add(victim.node_ip, num_cpus=1)
        emit(_observe_switch(run, Event.CAPACITY, joined_at, WORKERS))


def shrink(run: ShoalRun, kills: int, chance: random.Random, emit: Emit) -> None:
    for _ in range(kills):
        run.wait_for_random_moment(chance, WORKERS)
        asked_at = time.time()
        run.client.scale(run.id, max_workers=WORKERS - 1)
        emit(_observe_switch(run, Event.SHRINK, asked_at, WORKERS - 1))
        run.client.scale(run.id, max_workers=WORKERS)


def drain_nodes(nodes: Nodes, run: ShoalRun, kills: int, chance: random.Random, emit: Emit) -> None:
    """No other node has a free CPU, so the group shrinks. Then the drain is undone, and the group grows."""
    for _ in range(kills):
        run.wait_for_random_moment(chance, WORKERS)
        victim = chance.choice(run.workers())
        asked_at = time.time()
        run.client.drain(victim.node_id, reason="recovery benchmark")
        emit(_observe_switch(run, Event.DRAIN, asked_at, WORKERS - 1))
        run.client.undo_drain(victim.node_id)


def kill_head(nodes: Nodes, run: ShoalRun, kills: int, chance: random.Random, emit: Emit) -> None:
    """The control plane restarts the head."""
    for _ in range(kills):
        run.wait_for_random_moment(chance, WORKERS)
        before = [one.pid for one in run.workers()]
        at = nodes.kill_head()
        run.must(nodes.is_head_alive, "the head runs again")
        run.must(lambda: run.client.cluster().connected, "the control plane is connected again")
        back_at = time.time()
        run.must(lambda: _has_steps_since(run, back_at), "new steps are reported")  # noqa: B023
        trial = _undisturbed(run, Event.HEAD_KILL, at, before)
        trial.figures["head_back_s"] = round(back_at - at, 3)
        emit(trial)


def cut_hosts(hosts: Hosts, run: ShoalRun, kills: int, chance: random.Random, emit: Emit) -> None:
    """The host's processes keep running without a network; they are examined once its link is up again."""
    for _ in range(kills):
        run.wait_for_random_moment(chance, WORKERS)
        excluded = set(hosts.pids_of("SupervisorActor").values())
        victim = chance.choice([one for one in run.workers() if one.node_ip not in excluded])
        at = hosts.cut(victim.node_ip)
        trial = _observe(run, Event.HOST_CUT, at)
        trial.figures["isolated_worker_alive"] = is_alive(victim.pid)
        hosts.heal(victim.node_ip)
        died_s = died_after_s(victim.pid, time.time(), 60.0)
        trial.figures["isolated_worker_gone_s"] = None if died_s is None else round(died_s, 2)
        emit(trial)
        hosts.launch(victim.node_ip)


def kill_supervisor(nodes: Nodes, run: ShoalRun, kills: int, chance: random.Random, emit: Emit) -> None:
    for _ in range(kills):
        run.wait_for_random_moment(chance, WORKERS)
        before = [one.pid for one in run.workers()]
        [supervisor] = nodes.pids_of("SupervisorActor")
        at = send(supervisor, signal.SIGKILL)
        time.sleep(_QUIET_S)
        run.must(lambda: _has_steps_since(run, at + _QUIET_S), "the supervisor reports again")  # noqa: B023
        emit(_undisturbed(run, Event.SUPERVISOR_KILL, at, before))


def kill_control_plane(server: ShoalServer, run: ShoalRun, kills: int, chance: random.Random, emit: Emit) -> None:
    for _ in range(kills):
        run.wait_for_random_moment(chance, WORKERS)
        before = [one.pid for one in run.workers()]
        at = server.kill()
        time.sleep(_CONTROL_PLANE_DOWN_S)
        server.start()
        run.must(lambda: _has_steps_since(run, server.started_at), "the control plane has new steps")
        reported_at = time.time()
        trial = _undisturbed(run, Event.CONTROL_PLANE_KILL, at, before)
        trial.figures["reattached_s"] = round(reported_at - server.listening_at, 3)
        trial.figures["started_and_reattached_s"] = round(reported_at - server.started_at, 3)
        emit(trial)


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
    """For faults that must not disturb training: the longest gap between steps, minus a median step."""
    steps = run.steps()
    before = [one for one in steps if one.at <= at]
    since = [before[-1], *(one for one in steps if one.at > at)]
    step_s = steady_step_s(steps, before[-1])
    return Trial(
        System.SHOAL,
        event,
        pause_s=max(0.0, longest_gap_s(steps, before[-1].at, steps[-1].at) - step_s),
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


def _worker_away_from_supervisor(nodes: Nodes, run: ShoalRun, chance: random.Random) -> WorkerView:
    """A random worker on a node that runs neither the head nor the job's supervisor."""
    excluded = {HEAD} | {ip for pid in nodes.pids_of("SupervisorActor") if (ip := nodes.ip_of(pid))}
    return chance.choice([one for one in run.workers() if one.node_ip not in excluded])
