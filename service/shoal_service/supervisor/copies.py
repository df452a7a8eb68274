"""Copies of what an attempt was started with: the configuration of its supervisor, and the code of its job.

They lie beside the journal in the head's tables, and go with it. Never changed after they are made. Hidden here: that
Ray forgets. Used by `gateway/ray_cluster.py` and `workers/ray_fleet.py`.

StoredConfig: Ray passes the same arguments again when it restarts an actor. A control plane that starts a supervisor in
the place of another one does so too, although it may not be the one that started the first: the workers know one
snapshot key only. Job code can read and write what is stored here, so the home of a supervisor always comes from the
control plane.

CodePackage: a version of an attempt's code as a package of Ray's runtime environments, and a copy that Ray does not
know.

    control plane   store     package, and the copy beside the journal
    supervisor      restore   before each worker is created: the package again from the copy, if it is gone

Ray deletes a package with the last actor that it counts for it. A head that was started again counts only actors that
were created since. So when one of these died, the package of a job that trained on was gone, and no worker could start
on a node without a cached copy. Equal code of two jobs is one package, which the end of one may also delete.
"""

from __future__ import annotations

import hashlib
import logging

from shoal_service.cluster.errors import GcsUnavailable
from shoal_service.supervisor.config import SupervisorConfig
from shoal_service.supervisor.journal import KeyValueStore


class StoredConfig:
    """Keeps the configuration with which an attempt was started. Every method raises GcsUnavailable."""

    def __init__(self, store: KeyValueStore, job_id: str, attempt: int) -> None:
        self._store = store
        self._key = f"{job_id}/{attempt}/config".encode()

    def first(self, config: SupervisorConfig) -> tuple[SupervisorConfig, bool]:
        """Stores `config`, unless another one was stored before.

        Returns what is stored, with the home of `config`, and whether a supervisor may have been started with another
        home.
        """
        if self._store.add(self._key, config.model_dump_json().encode()):
            return config, False
        known = self.read()
        merged = (known or config).model_copy(update={"home": config.home})
        self.put(merged)
        return merged, known is None or known.home != config.home

    def put(self, config: SupervisorConfig) -> None:
        self._store.put(self._key, config.model_dump_json().encode())

    def read(self) -> SupervisorConfig | None:
        """Reads what is stored; None if the attempt is over. Fields of other releases are left out; a release whose
        supervisors do not dial home has stored no home."""
        raw = self._store.get(self._key)
        return SupervisorConfig.model_validate_json(raw, extra="ignore") if raw is not None else None


_log = logging.getLogger(__name__)


def version_of(archive: bytes) -> str:
    return hashlib.sha256(archive).hexdigest()


class CodePackage:
    """Keeps a copy of one version of the attempt's code. All methods block on the head, for two seconds at most per
    request."""

    def __init__(self, packages: KeyValueStore, copies: KeyValueStore, job_id: str, attempt: int, uri: str) -> None:
        """
        Args:
            packages: the namespace in which Ray looks for packages.
            copies: the namespace of the journals.
        """
        self._packages = packages
        self._copies = copies
        self._copy = f"{job_id}/{attempt}/code/{uri}".encode()
        self._uri = uri.encode()

    def store(self, archive: bytes) -> None:
        """Stores the package and the copy. Raises GcsUnavailable."""
        self._copies.put(self._copy, archive)
        self._packages.put(self._uri, archive)

    def restore(self) -> None:
        """Puts the package back from the copy if it is gone. Does nothing while the head is away: no worker can be
        created either."""
        try:
            if self._packages.keys(self._uri):
                return
            archive = self._copies.get(self._copy)
            if archive is None:
                _log.error("code_package.lost", extra={"uri": self._uri.decode()})
                return
            self._packages.put(self._uri, archive)
            _log.warning("code_package.restored", extra={"uri": self._uri.decode()})
        except GcsUnavailable as error:
            _log.warning("code_package.not_checked", extra={"error": str(error)})
