"""What the supervisor of an attempt was started with, kept beside its journal.

Ray passes the same arguments again when it restarts an actor. A control plane that starts a supervisor in the place of
another one does so too, although it may not be the one that started the first: the workers know one snapshot key only.
Job code can read and write what is stored here, so the home of a supervisor always comes from the control plane.
Called by `gateway/ray_cluster.py`. The journal deletes it with the attempt.
"""

from __future__ import annotations

from shoal_service.supervisor.config import SupervisorConfig
from shoal_service.supervisor.journal import KeyValueStore


class StoredConfig:
    """Every method raises GcsUnavailable."""

    def __init__(self, store: KeyValueStore, job_id: str, attempt: int) -> None:
        self._store = store
        self._key = f"{job_id}/{attempt}/config".encode()

    def first(self, config: SupervisorConfig) -> tuple[SupervisorConfig, bool]:
        """Stores `config`, unless another one was stored before; returns what is stored, with the home of `config`, and
        whether a supervisor may have been started with another home."""
        if self._store.add(self._key, config.model_dump_json().encode()):
            return config, False
        known = self.read()
        merged = (known or config).model_copy(update={"home": config.home})
        self.put(merged)
        return merged, known is None or known.home != config.home

    def put(self, config: SupervisorConfig) -> None:
        self._store.put(self._key, config.model_dump_json().encode())

    def read(self) -> SupervisorConfig | None:
        """None: the attempt is over. Fields of other releases are left out; one whose supervisors do not dial home has
        stored no home."""
        raw = self._store.get(self._key)
        return SupervisorConfig.model_validate_json(raw, extra="ignore") if raw is not None else None
