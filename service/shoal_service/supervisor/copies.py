"""Copies of what an attempt was started with: the configuration of its supervisor, and the code of its job.

They lie beside the journals in the head's tables. Never changed after they are made. Hidden here: that
Ray forgets. Used by `gateway/ray_cluster.py` and `workers/ray_fleet.py`.

StoredConfig: Ray passes the same arguments again when it restarts an actor. A control plane that starts a supervisor in
the place of another one does so too, although it may not be the one that started the first: the workers know one
snapshot key only. Job code can read and write what is stored here, so the home of a supervisor always comes from the
control plane.

CodePackage: a version of a job's code as a package of Ray's runtime environments, and a copy that Ray does not know.
Equal code is there once, however many attempts have it:

    code/URI                     the copy
    code-of/URI/JOB/ATTEMPT      an attempt that needs it ...
    JOB/ATTEMPT/code/URI         ... until its journal is deleted

    gateway      hold, store    package and copy, if the head has none
    supervisor   restore        before each worker is created: the package again from the copy, if it is gone
    gateway      drop_unheld    with the end of each attempt

Ray deletes a package with the last actor that it counts for it. A head that was started again counts only actors that
were created since. So when one of these died, the package of a job that trained on was gone, and no worker could start
on a node without a cached copy. The end of another job with equal code deletes it too.
"""

from __future__ import annotations

import hashlib
import logging
import threading

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


def hash_archive(archive: bytes) -> str:
    return hashlib.sha256(archive).hexdigest()


_COPY, _HOLDERS = "code/", "code-of/"
_changing = threading.Lock()
"""A gateway deletes no copy while it counts another attempt among those that need it."""


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
        self._copy = f"{_COPY}{uri}".encode()
        self._holders = (f"{_HOLDERS}{uri}/{job_id}/{attempt}".encode(), f"{job_id}/{attempt}/code/{uri}".encode())
        self._uri = uri.encode()

    def hold(self) -> bool:
        """Keeps the code for the attempt. False: the head does not have it. Raises GcsUnavailable."""
        with _changing:
            for holder in self._holders:
                self._copies.put(holder, b"1")
            if not self._copies.keys(self._copy):
                return False
            self._put_back()
            return True

    def store(self, archive: bytes) -> None:
        """Stores the package and the copy, for the attempt. Raises GcsUnavailable."""
        if not self.hold():
            self._copies.put(self._copy, archive)
            self._packages.put(self._uri, archive)

    def restore(self) -> None:
        """Puts the package back from the copy if it is gone. Does nothing while the head is away: no worker can be
        created either."""
        try:
            self._put_back()
        except GcsUnavailable as error:
            _log.warning("code_package.not_checked", extra={"error": str(error)})

    def _put_back(self) -> None:
        if self._packages.keys(self._uri):
            return
        archive = self._copies.get(self._copy)
        if archive is None:
            _log.error("code_package.lost", extra={"uri": self._uri.decode()})
            return
        self._packages.put(self._uri, archive)
        _log.warning("code_package.restored", extra={"uri": self._uri.decode()})


def drop_unheld(copies: KeyValueStore) -> None:
    """Deletes the copies of code that no attempt with a journal needs. While the head is away it does nothing: the end
    of the next attempt does it."""
    try:
        with _changing:
            _drop_unheld(copies)
    except GcsUnavailable as error:
        _log.warning("code_package.not_dropped", extra={"error": str(error)})


def _drop_unheld(copies: KeyValueStore) -> None:
    is_held: dict[str, bool] = {}
    for key in copies.keys(_HOLDERS.encode()):
        uri, job_id, attempt = key.decode().removeprefix(_HOLDERS).rsplit("/", 2)
        if not is_held.get(uri):
            is_held[uri] = bool(copies.keys(f"{job_id}/{attempt}/code/{uri}".encode()))
            if not is_held[uri]:
                copies.delete(key)
    for uri in (uri for uri, held in is_held.items() if not held):
        copies.delete(f"{_COPY}{uri}".encode())
