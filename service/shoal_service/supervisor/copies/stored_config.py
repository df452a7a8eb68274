"""What the supervisor of an attempt was started with, kept beside its journal.

Ray passes the same arguments again when it restarts an actor. A control plane that starts a supervisor in the place of
another one does so too, although it may not be the one that started the first: the workers know one snapshot key only.
Job code can write what is stored here, so the public key of the attempt always comes from the control plane.
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

    def first(self, config: SupervisorConfig) -> SupervisorConfig:
        """Stores `config`, unless another one was stored before; returns what is stored, with the key of `config`."""
        if self._store.add(self._key, config.model_dump_json().encode()):
            return config
        return self.read(config.public_key) or config

    def read(self, public_key: str) -> SupervisorConfig | None:
        """With this key. None: a release that did not keep it started the supervisor, or the attempt is over."""
        raw = self._store.get(self._key)
        if raw is None:
            return None
        return SupervisorConfig.model_validate_json(raw).model_copy(update={"public_key": public_key})
