"""Rendezvous of the ranks of a generation: they connect to the store of rank 0 and exchange short texts.

    arrive   all are there                                  nothing comes back
    decide   all have given a text, rank 0 decides          one text comes back
    gather   all have given a text                          all texts come back: N values for N ranks

Every wait has a deadline, and `wake` lets it look at the fence at once. No name server is asked (docs/decisions/0002).
Called by `Group` on the training thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from torch.distributed import DistError

from shoal_workers.contract.messages import Assignment
from shoal_workers.engine.generation_ends import FormFailed
from shoal_workers.engine.group.store.client import GenerationStore, StoreConnection
from shoal_workers.engine.group.store.messages import Space

_PAUSE_S = 0.02
_SHOWN = 16
"""Missing ranks in a message."""

Answer = TypeVar("Answer")


class StoreConnections:
    """A worker's connection to the last store that it used, kept for the next generation. Training thread only."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._idle: StoreConnection | None = None

    def take(self, assignment: Assignment, check: Callable[[], None], patience_s: float) -> StoreConnection:
        """A proven connection to the assignment's store. OSError: none within `patience_s`."""
        address = (assignment.store_host, assignment.store_port)
        idle, self._idle = self._idle, None
        if idle is not None:
            if idle.address == address and idle.is_idle:
                return idle
            idle.close()
        return StoreConnection(address, self._key, check=check, patience_s=patience_s)

    def give_back(self, connection: StoreConnection) -> None:
        if self._idle is None and connection.is_idle:
            self._idle = connection
        else:
            connection.close()

    def close(self) -> None:
        if self._idle is not None:
            self._idle.close()
            self._idle = None


class Rendezvous:
    """The store of one generation. Training thread only, except `wake`.

    Args:
        check: called when a wait is woken; raises Fenced once the generation is over.
    """

    def __init__(self, assignment: Assignment, connections: StoreConnections, check: Callable[[], None]) -> None:
        self._assignment = assignment
        self._connections = connections
        self._check = check
        self._deadline_mono = time.monotonic() + assignment.rendezvous_s
        self._connection: StoreConnection | None = None
        self._store: GenerationStore | None = None

    @property
    def store(self) -> GenerationStore:
        assert self._store is not None, "connect first"
        return self._store

    def connect(self) -> None:
        """Raises FormFailed if the store does not answer before the deadline."""
        a = self._assignment
        while True:
            self._check()
            try:
                patience_s = max(_PAUSE_S, self._deadline_mono - time.monotonic())
                self._connection = self._connections.take(a, self._check, patience_s)
                break
            except OSError as error:
                self._check()
                if time.monotonic() >= self._deadline_mono:
                    message = (
                        f"the rendezvous store at {a.store_host}:{a.store_port} could not be reached within "
                        f"{a.rendezvous_s:g} s: {error}"
                    )
                    raise FormFailed(message) from error
                time.sleep(_PAUSE_S)  # refused: the worker with the store is not up yet, or gone
        self._store = GenerationStore(
            self._connection,
            Space(a.generation, f"{a.job_id}/{a.attempt}"),
            check=self._check,
            timeout=timedelta(seconds=a.rendezvous_s),
        )

    def gather(self, what: str, value: str, *, timeout_s: float | None = None) -> list[str]:
        """Returns every rank's `value`, by rank, once all ranks have given theirs, with `gather` or `arrive`.

        Only where every rank needs every value: rank 0's node sends N values N times. FormFailed names the missing
        ranks.
        """
        return self._all_ranks(self.store.gather, what, value, timeout_s)

    def arrive(self, what: str, value: str = "", *, timeout_s: float | None = None) -> None:
        """Waits for all ranks as `gather` does, but does not fetch their values."""
        self._all_ranks(self.store.arrive, what, value, timeout_s)

    def decide(
        self, what: str, value: str, decision: Callable[[list[str]], str], *, timeout_s: float | None = None
    ) -> str:
        """What rank 0 decides from the values of all ranks, on every rank; the others do not get the values.

        FormFailed names the missing ranks. What `decision` raises is raised on rank 0; the others wait in vain.
        """
        key = f"{what}/decision"
        try:
            if self._assignment.rank == 0:
                decided = decision(self.gather(what, value, timeout_s=timeout_s))
                self.store.set(key, decided)
                return decided
            self.arrive(what, value, timeout_s=timeout_s)
            return self.store.get(key).decode()
        except DistError as error:
            raise FormFailed(str(error)) from error

    def wake(self) -> None:
        """Called from any thread: makes a wait look at the fence now."""
        store = self._store
        if store is not None:
            store.wake()

    def close(self) -> GenerationStore | None:
        """The connection may serve the next generation. Returns the store, which must not be freed before the groups
        that were made with it."""
        connection, store = self._connection, self._store
        self._connection = self._store = None
        if store is not None:
            store.close()
        if connection is not None:
            self._connections.give_back(connection)
        return store

    def _all_ranks(self, ask: Callable[..., Answer], what: str, value: str, timeout_s: float | None) -> Answer:
        a = self._assignment
        left_s = self._deadline_mono - time.monotonic() if timeout_s is None else timeout_s
        try:
            return ask(what, a.rank, a.world_size, value, timedelta(seconds=max(0.05, left_s)))
        except DistError as error:
            limit_s = a.rendezvous_s if timeout_s is None else timeout_s
            raise FormFailed(self._missing_ranks(what, limit_s, error)) from error

    def _missing_ranks(self, what: str, limit_s: float, error: DistError) -> str:
        a = self._assignment
        try:
            missing = self.store.absent(what, a.world_size)
        except DistError:
            missing = []
        if not missing:
            return str(error)
        shown = ", ".join(map(str, missing[:_SHOWN]))
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        return (
            f"{len(missing)} of {a.world_size} ranks did not arrive ({what}) within {limit_s:g} s: rank {shown}{more}."
        )
