"""Rendezvous of the ranks of a generation: a store under a prefix of its own, with waits in short slices.

A blocking store call cannot be interrupted from Python and may wait for a minute. The sweeper ends it by shutting down
the connection to the store. In addition every wait here is cut into slices, and the fence is checked between them.
Called by `Group` on the training thread.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import DistError

from shoal_workers.contract.messages import Assignment
from shoal_workers.engine.errors import FormFailed
from shoal_workers.engine.group.gloo_sockets import Address

_SLICE_S = 5.0
"""Long, because torch logs a warning at the end of each."""


class Rendezvous:
    """The store of one generation. Training thread only.

    Args:
        check: called between slices; raises Fenced once the generation is over.
    """

    def __init__(self, assignment: Assignment, check: Callable[[], None]) -> None:
        self._assignment = assignment
        self._check = check
        self._deadline_mono = time.monotonic() + assignment.store_timeout_s
        self._tcp: TCPStore | None = None
        self._store: PrefixStore | None = None

    @property
    def store(self) -> PrefixStore:
        assert self._store is not None, "connect first"
        return self._store

    def addresses(self) -> frozenset[Address]:
        """The store's own addresses, as the far end of a connection shows them."""
        a = self._assignment
        try:
            found = socket.getaddrinfo(a.store_host, a.store_port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise FormFailed(f"the store's host {a.store_host!r} cannot be resolved: {error}") from error
        return frozenset((str(entry[4][0]), int(entry[4][1])) for entry in found)

    def connect(self) -> None:
        """Raises FormFailed if the store does not answer before the deadline."""
        a = self._assignment
        while True:
            self._check()
            try:
                self._reach()
                self._tcp = TCPStore(
                    a.store_host, a.store_port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=2)
                )
                break
            except (OSError, DistError) as error:
                self._check()
                if time.monotonic() >= self._deadline_mono:
                    message = (
                        f"the rendezvous store at {a.store_host}:{a.store_port} could not be reached within "
                        f"{a.store_timeout_s:g} s: {error}"
                    )
                    raise FormFailed(message) from error
        self._tcp.set_timeout(timedelta(seconds=a.store_timeout_s))
        self._store = PrefixStore(f"{a.job_id}/{a.attempt}/{a.generation}", self._tcp)

    def gather(self, what: str, value: str, *, timeout_s: float | None = None) -> list[str]:
        """Every rank's `value`, by rank, once all ranks have set theirs. FormFailed names the missing ranks."""
        a = self._assignment
        deadline_mono = self._deadline_mono if timeout_s is None else time.monotonic() + timeout_s
        keys = [f"{what}/{rank}" for rank in range(a.world_size)]
        self.store.set(keys[a.rank], value)
        while True:
            self._check()
            try:
                left_s = max(0.05, deadline_mono - time.monotonic())
                self.store.wait(keys, timedelta(seconds=min(left_s, _SLICE_S)))
                return [value.decode() for value in self.store.multi_get(keys)]
            except DistError as error:
                self._check()
                if time.monotonic() >= deadline_mono:
                    raise FormFailed(self._missing_ranks(what, keys)) from error
                if not self._is_alive():
                    raise FormFailed(
                        f"the rendezvous store at {a.store_host}:{a.store_port} was lost: {error}"
                    ) from error

    def close(self) -> None:
        self._store = self._tcp = None

    def _reach(self) -> None:
        """Try a plain connection first: torch's own attempt cannot be interrupted before its timeout."""
        a = self._assignment
        try:
            socket.create_connection((a.store_host, a.store_port), timeout=0.5).close()
        except OSError:
            time.sleep(0.02)  # refused: the worker with the store is not up yet, or gone
            raise

    def _is_alive(self) -> bool:
        try:
            self.store.check([])
        except DistError:
            return False
        return True

    def _missing_ranks(self, what: str, keys: list[str]) -> str:
        a = self._assignment
        try:
            missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
        except DistError as error:
            return f"the rendezvous store at {a.store_host}:{a.store_port} does not answer: {error}"
        return (
            f"{len(missing)} of {a.world_size} ranks did not arrive ({what}) within {a.store_timeout_s:g} s: "
            f"rank {', '.join(map(str, missing))}."
        )
