"""Rendezvous of the ranks of a generation: they connect to the store of rank 0 and exchange short texts.

    arrive   waits until every rank has arrived             returns nothing
    decide   every rank gives a text, and rank 0 decides    returns the decision
    gather   every rank gives a text                        returns all texts: N values to N ranks

Every wait has a deadline, and `wake` lets it check the fence at once. No name server is used (docs/decisions/0002).
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
_MAX_RANKS_IN_MESSAGE = 16

Answer = TypeVar("Answer")


class StoreConnections:
    """Keeps a worker's connection to the last store for the next generation. Training thread only."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._idle: StoreConnection | None = None

    def take(self, assignment: Assignment, check: Callable[[], None], patience_s: float) -> StoreConnection:
        """Return a proven connection to the assignment's store. Raises OSError: none within `patience_s`."""
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
        check: called when `wake` ends a wait; raises Fenced once the generation is over.
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
        """Connect to the store. Raises FormFailed if it does not answer before the deadline."""
        assignment = self._assignment
        while True:
            self._check()
            try:
                patience_s = max(_PAUSE_S, self._deadline_mono - time.monotonic())
                self._connection = self._connections.take(assignment, self._check, patience_s)
                break
            except OSError as error:
                self._check()
                if time.monotonic() >= self._deadline_mono:
                    message = (
                        f"the rendezvous store at {assignment.store_host}:{assignment.store_port} could not be reached "
                        f"within {assignment.rendezvous_s:g} s: {error}"
                    )
                    raise FormFailed(message) from error
                time.sleep(_PAUSE_S)  # refused: the worker with the store is not up yet, or gone
        self._store = GenerationStore(
            self._connection,
            Space(assignment.generation, f"{assignment.job_id}/{assignment.attempt}"),
            check=self._check,
            timeout=timedelta(seconds=assignment.rendezvous_s),
        )

    def gather(self, what: str, value: str, *, timeout_s: float | None = None) -> list[str]:
        """Return the values of all ranks, by rank, once each has called `gather` or `arrive`.

        Use it only if every rank needs every value: rank 0's node sends N values N times.

        Raises:
            FormFailed: names the missing ranks.
        """
        return self._wait_for_all(self.store.gather, what, value, timeout_s)

    def arrive(self, what: str, value: str = "", *, timeout_s: float | None = None) -> None:
        """Wait for all ranks, as `gather` does, without fetching their values."""
        self._wait_for_all(self.store.arrive, what, value, timeout_s)

    def decide(
        self, what: str, value: str, decision: Callable[[list[str]], str], *, timeout_s: float | None = None
    ) -> str:
        """Return, on every rank, what `decision` makes on rank 0 of the values of all ranks.

        Raises:
            FormFailed: names the missing ranks. An error of `decision` is raised on rank 0 only; then the others raise
                FormFailed at the end of their wait.
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
        """Let a wait check the fence now. Any thread."""
        store = self._store
        if store is not None:
            store.wake()

    def close(self) -> GenerationStore | None:
        """Give the connection back for the next generation.

        Return the store, which must not be freed before the groups that were made with it.
        """
        connection, store = self._connection, self._store
        self._connection = self._store = None
        if store is not None:
            store.close()
        if connection is not None:
            self._connections.give_back(connection)
        return store

    def _wait_for_all(self, call: Callable[..., Answer], what: str, value: str, timeout_s: float | None) -> Answer:
        assignment = self._assignment
        left_s = self._deadline_mono - time.monotonic() if timeout_s is None else timeout_s
        try:
            return call(what, assignment.rank, assignment.world_size, value, timedelta(seconds=max(0.05, left_s)))
        except DistError as error:
            limit_s = assignment.rendezvous_s if timeout_s is None else timeout_s
            raise FormFailed(self._describe_missing(what, limit_s, error)) from error

    def _describe_missing(self, what: str, limit_s: float, error: DistError) -> str:
        assignment = self._assignment
        try:
            missing = self.store.absent(what, assignment.world_size)
        except DistError:
            missing = []
        if not missing:
            return str(error)
        ranks = ", ".join(map(str, missing[:_MAX_RANKS_IN_MESSAGE]))
        more = f" and {len(missing) - _MAX_RANKS_IN_MESSAGE} more" if len(missing) > _MAX_RANKS_IN_MESSAGE else ""
        count = f"{len(missing)} of {assignment.world_size} ranks"
        return f"{count} did not arrive ({what}) within {limit_s:g} s: rank {ranks}{more}."
