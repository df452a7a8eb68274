"""SupervisorActor: the Ray actor around one supervisor, and its composition root.

Detached and named: it outlives the control plane that started it, and Ray restarts it when its process dies. Started
by `gateway/ray_cluster.py` only. It has no methods to call: it dials home, and obeys what it gets there.
"""

from __future__ import annotations

from functools import partial

import ray
from shoal_service.clock import SystemClock
from shoal_service.cluster.gcs import GcsKeyValueStore, GcsNodeWatch, read_ends
from shoal_service.collector import collect_rarely
from shoal_service.core.attempt.messages import Command
from shoal_service.supervisor.checkpoints import CheckpointCatalog
from shoal_service.supervisor.config import SupervisorConfig
from shoal_service.supervisor.dialer import HttpLink
from shoal_service.supervisor.journal import JOURNAL_NAMESPACE, GcsJournal
from shoal_service.supervisor.protocols import World
from shoal_service.supervisor.supervisor import Supervisor
from shoal_service.supervisor.workers import probes
from shoal_service.supervisor.workers.probes import HostProbe
from shoal_service.supervisor.workers.ray_fleet import RayAgents, RayFleet
from shoal_workers.actor import WorkerActor
from shoal_workers.actor_process import exit_with_raylet
from shoal_workers.logs import SHOAL_LOGGERS, set_up_logs


class SupervisorActor:
    worker_class: type[WorkerActor] = WorkerActor
    """Class of the worker actors that the supervisor starts; a benchmark of supervisors gives workers that do not
    train."""

    def __init__(self, config: SupervisorConfig) -> None:
        exit_with_raylet()
        clock = SystemClock()
        journal = GcsJournal(GcsKeyValueStore(JOURNAL_NAMESPACE), config.job_id, config.attempt)

        self.config = config
        self.life = 0

        def make_world(life: int) -> World:
            self.life = life
            return World(
                fleet=RayFleet(
                    config, life=life, require_current=journal.require_current, worker_class=self.worker_class
                ),
                journal=journal,
                catalog=CheckpointCatalog(config.checkpoint_root),
                node_watch=GcsNodeWatch(),
                host_watch=HostProbe(ray.get_runtime_context().get_node_id(), silent=frozenset(config.silent)),
                clock=clock,
                until_gone=probes.until_gone,
                agents=RayAgents(config, life=life),
                before_command=self.before_command,
            )

        identity = {"job": config.job_id, "attempt": config.attempt}
        set_up_logs(config.logs, loggers=SHOAL_LOGGERS, context=lambda: identity)
        last_ends = partial(read_ends, ray.get_runtime_context().get_actor_id())
        self._supervisor = Supervisor(config, journal, clock, make_world, last_ends)
        set_up_logs(config.logs, loggers=SHOAL_LOGGERS, context=self._supervisor.log_fields)
        collect_rarely()
        home = config.home
        self._supervisor.start(HttpLink(home, config.job_id, config.attempt) if home is not None else None)

    def before_command(self, command: Command) -> None:
        """Called when a command is in the journal and is not performed yet. Fault tests end the process here."""
