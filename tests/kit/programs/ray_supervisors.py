"""Real supervisors and workers over Ray: a death between journal and orders, and two supervisors of one attempt.

A pytest module of its own process, a driver of a running cluster. Started by `tests/ray/test_contracts.py`, with the
cluster's address in SHOAL_TEST_RAY_ADDRESS.
"""

from __future__ import annotations

import os
import queue
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RayActorError

import ray
from ray import cloudpickle
from shoal_service.cluster.gcs import GcsKeyValueStore
from shoal_service.core.attempt.commands import Command, Commit, Interrupt, Run
from shoal_service.gateway.ray_cluster import RayCluster
from shoal_service.reports import SupervisorReports
from shoal_service.supervisor.actor import SupervisorActor
from shoal_service.supervisor.config import SupervisorConfig
from shoal_service.supervisor.journal import JOURNAL_NAMESPACE, GcsJournal
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.ids import NAMESPACE, life_of, supervisor_name
from shoal_workers.contract.job import EndReason

_PATIENCE_S = 120.0
STEPS = 40
LONG = 2000
"""Steps of a run that lasts longer than the start of a supervisor."""


class MortalSupervisor(SupervisorActor):
    """It has no home: the test reads its outbox.

    Its process ends in its first life before the first order of the kind that its job's name ends with.
    """

    def before_command(self, command: Command) -> None:
        kinds = {"run": Run, "commit": Commit, "interrupt": Interrupt}
        kind = kinds.get(self.config.spec.name.rpartition("-")[2])
        if kind is not None and self.life == 1 and isinstance(command, kind):
            os._exit(1)

    def pull(self, after: int, wait_s: float) -> SupervisorReports:
        return self._supervisor.outbox.pull(after, wait_s)


class StillbornSupervisor(MortalSupervisor):
    """Its process ends before it has recorded its start."""

    def __init__(self, config: SupervisorConfig) -> None:
        os._exit(1)


class UncreatableSupervisor(MortalSupervisor):
    """Ray cannot create its actor."""

    def __init__(self, config: SupervisorConfig) -> None:
        raise OSError("the code package is missing")


@pytest.fixture(scope="session", autouse=True)
def _driver() -> Iterator[None]:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the cluster's nodes do not have this module
    ray.init(os.environ["SHOAL_TEST_RAY_ADDRESS"], namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


class Attempt:
    def __init__(
        self, folder: Path, *, steps: int = STEPS, every_steps: int = 20, dies_before: str = "nothing"
    ) -> None:
        spec = parse_spec(
            {
                "name": f"before-{dies_before}",
                "data": {"corpus": "python-stdlib"},
                "model": {"dim": 16, "num_layers": 1, "num_heads": 2, "seq_len": 16},
                "batch": {"global_size": 4, "micro_size": 2},
                "stop": {"steps": steps},
                "checkpoint": {"every_steps": every_steps},
                "elasticity": {"min_workers": 2, "max_workers": 2},
            }
        )
        self.config = SupervisorConfig(
            job_id=uuid.uuid4().hex,
            attempt=1,
            spec=spec,
            checkpoint_root=str(folder / "checkpoints"),
            granted=2,
            epoch=1,
            spec_version=1,
            snapshot_key="secret",
        )
        self.journal = GcsJournal(GcsKeyValueStore(JOURNAL_NAMESPACE), self.config.job_id, 1)
        self.events: list[Any] = []
        self.incidents: dict[int, Any] = {}
        self.suspects: list[Any] = []
        self.checkpoints: dict[tuple[int, int], str] = {}
        self.losses: dict[int, float] = {}

    def start(self, name: str, *, max_restarts: int = -1, kind: type[MortalSupervisor] = MortalSupervisor) -> Any:
        actor = ray.remote(max_concurrency=4)(kind)
        options = {"name": name, "namespace": NAMESPACE, "lifetime": "detached", "num_cpus": 0}
        return actor.options(**options, max_restarts=max_restarts, max_task_retries=max_restarts).remote(self.config)

    def follow(self, supervisor: Any, until: Callable[[Any], bool]) -> Any:
        """Pull until the condition holds for the reports."""
        after, deadline = 0, time.monotonic() + _PATIENCE_S
        while True:
            assert time.monotonic() < deadline, [event.type for event in self.events]
            reports = ray.get(supervisor.pull.remote(after, 1.0), timeout=_PATIENCE_S)
            after = reports.seq
            self.events += reports.events
            self.incidents |= {incident.id: incident for incident in reports.incidents}
            self.suspects += reports.suspects
            self.checkpoints |= {(view.step, view.generation): view.state for view in reports.checkpoints}
            self.losses |= {point.step: point.loss for point in reports.series}
            if until(reports):
                return reports

    def clear(self, *supervisors: Any) -> None:
        for supervisor in supervisors:
            ray.kill(supervisor, no_restart=True)
        for index in range(6):
            try:
                worker = ray.get_actor(f"shoal/{self.config.job_id}/1/worker-{index}", namespace=NAMESPACE)
            except ValueError:
                continue
            ray.kill(worker, no_restart=True)
        self.journal.delete()


@pytest.mark.parametrize("dies_before", ["run", "commit"])
def test_a_supervisor_that_dies_between_the_journal_and_an_order_costs_nothing(
    dies_before: str, tmp_path: Path
) -> None:
    attempt = Attempt(tmp_path, dies_before=dies_before)
    supervisor = attempt.start(supervisor_name(attempt.config.job_id, 1))
    try:
        end = attempt.follow(supervisor, lambda reports: reports.end is not None).end
        assert (end.reason, end.step) == (EndReason.FINISHED, STEPS), end.message
        assert [event.type for event in attempt.events].count("supervisor.restarted") == 1
        assert attempt.incidents == {} and attempt.suspects == []
        forming = [event.data for event in attempt.events if event.type == "generation.forming"]
        assert len(forming) == 1, "the very group that was in the journal"
        assert attempt.checkpoints == {(20, 1): "committed", (40, 1): "committed"}
    finally:
        attempt.clear(supervisor)


def test_the_processes_of_a_supervisor_that_never_records_its_start_are_counted(tmp_path: Path) -> None:
    """Ray starts one after the other, and keeps the call: nothing else shows it."""
    attempt = Attempt(tmp_path)
    cluster = RayCluster()
    supervisor = attempt.start(supervisor_name(attempt.config.job_id, 1), kind=StillbornSupervisor)
    pull = supervisor.pull.remote(0, 1.0)
    try:
        deadline = time.monotonic() + _PATIENCE_S
        while cluster.unrecorded_starts(attempt.config.job_id, 1) < 3:
            assert time.monotonic() < deadline
            assert ray.wait([pull], timeout=0.5)[0] == []
    finally:
        attempt.clear(supervisor)


def test_a_supervisor_that_ray_cannot_create_is_in_the_snapshot_until_it_is_reaped(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path)
    cluster, key = RayCluster(UncreatableSupervisor), (attempt.config.job_id, 1)
    changes: queue.Queue[None] = queue.Queue()
    unwatch = cluster.watch(lambda: changes.put(None))
    try:
        cluster.start_supervisor(attempt.config, avoid_nodes=frozenset(), places={})
        while key not in cluster.snapshot().failed:
            changes.get(timeout=_PATIENCE_S)  # no look is needed to notice it
        assert cluster.find_supervisor(*key) is None
        assert "the code package is missing" in cluster.why_gone(*key)
        cluster.reap(*key)
        assert cluster.snapshot().failed == frozenset()
    finally:
        unwatch()
        attempt.journal.delete()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of an attempt with one supervisor."""
    attempt = Attempt(tmp_path_factory.mktemp("undisturbed"), steps=LONG, every_steps=LONG)
    supervisor = attempt.start(supervisor_name(attempt.config.job_id, 1))
    try:
        end = attempt.follow(supervisor, lambda reports: reports.end is not None).end
        assert (end.reason, end.step) == (EndReason.FINISHED, LONG), end.message
    finally:
        attempt.clear(supervisor)
    return attempt.losses


@pytest.mark.parametrize(
    ("every_steps", "is_refused"),
    [
        pytest.param(LONG, True, id="refused by a worker"),  # its polls are the only calls that it makes
        pytest.param(20, False, id="about to commit"),  # the journal tells it, perhaps before any worker refuses it
    ],
)
def test_of_two_supervisors_the_newer_one_is_obeyed_and_the_older_one_ends(
    every_steps: int, is_refused: bool, tmp_path: Path, undisturbed: dict[int, float]
) -> None:
    attempt = Attempt(tmp_path, steps=LONG, every_steps=every_steps)
    name = supervisor_name(attempt.config.job_id, 1)
    older = attempt.start(f"{name}-cut-off", max_restarts=0)
    newer = None
    try:
        attempt.follow(older, lambda reports: reports.status.step >= 3)
        newer = attempt.start(name)
        with pytest.raises(RayActorError):
            attempt.follow(older, lambda reports: reports.end is not None)
        after = ray.get(newer.pull.remote(0, 0.0), timeout=_PATIENCE_S)
        assert after.status.step < LONG, "both supervisors were there while the group trained"
        reports = attempt.follow(newer, lambda reports: reports.end is not None)
        assert (reports.end.reason, reports.end.step) == (EndReason.FINISHED, LONG), reports.end.message
        assert not is_refused or reports.status.refused_calls >= 1
        # a set: both supervisors report the events that were not acknowledged
        types = [kind for _, kind in {(event.at, event.type) for event in attempt.events}]
        assert types.count("generation.forming") == 1 and types.count("supervisor.restarted") == 1, types
        assert attempt.incidents == {} and attempt.suspects == [], "no worker was ended"
        assert {life_of(generation) for _, generation in attempt.checkpoints} == {1}, "the group was never disturbed"
        assert {step: undisturbed[step] for step in attempt.losses} == attempt.losses and LONG in attempt.losses
    finally:
        attempt.clear(*(actor for actor in (older, newer) if actor is not None))
