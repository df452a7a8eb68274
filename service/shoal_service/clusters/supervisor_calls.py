"""The calls of a driver to the supervisor of its attempt, as orders to the gateway of the cluster: both ends of them.

JoinedSupervisor   on the side of the control plane
SupervisorDesk     on the side of the gateway, which holds the handles of the actors
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from shoal_service.cluster.errors import ClusterUnreachable, SupervisorGone, SupervisorUnavailable
from shoal_service.clusters import calls
from shoal_service.clusters.snapshot import AttemptKey
from shoal_service.reports import SupervisorReports
from shoal_service.signing.calls import SignedCall
from shoal_service.supervisor.config import Directive
from shoal_workers.contract.base import Frozen
from shoal_workers.contract.messages import Stacks

CALLS = (calls.Pull, calls.Direct, calls.TakeStacks, calls.Release)


class SupervisorHandle(Protocol):
    """One attempt's supervisor. `pull`, `direct` and `stacks` raise SupervisorGone (the actor is dead, and Ray does
    not restart it), SupervisorUnavailable, StaleEpoch and CallRefused.

    `signed`: the same call with its signature, which is then all that the supervisor reads. None: the attempt began
    without a key."""

    async def pull(self, after: int, wait_s: float, epoch: int, signed: SignedCall | None = None) -> SupervisorReports:
        """Long poll: everything reported after sequence number `after`, which acknowledges everything up to it."""

    async def direct(self, directive: Directive, signed: SignedCall | None = None) -> None: ...

    async def stacks(
        self, rank: int | None, native: bool, epoch: int, signed: SignedCall | None = None
    ) -> Stacks | None:
        """What all workers do now, or one rank; None: the attempt is over."""

    async def release(self, epoch: int, signed: SignedCall | None = None) -> None:
        """The attempt's end is stored: the supervisor may go."""


class JoinedSupervisor:
    """A `SupervisorHandle` whose calls are orders."""

    def __init__(self, ask: Callable[[Frozen], Awaitable[Any]], job_id: str, attempt: int) -> None:
        self._ask_cluster = ask
        self._of: dict[str, Any] = {"job_id": job_id, "attempt": attempt}

    async def pull(self, after: int, wait_s: float, epoch: int, signed: SignedCall | None = None) -> SupervisorReports:
        request = calls.Pull(**self._of, after=after, wait_s=wait_s, epoch=epoch, signed=signed)
        reports: SupervisorReports = await self._ask(request)
        return reports

    async def direct(self, directive: Directive, signed: SignedCall | None = None) -> None:
        await self._ask(calls.Direct(**self._of, directive=directive, signed=signed))

    async def stacks(
        self, rank: int | None, native: bool, epoch: int, signed: SignedCall | None = None
    ) -> Stacks | None:
        request = calls.TakeStacks(**self._of, rank=rank, native=native, epoch=epoch, signed=signed)
        stacks: Stacks | None = await self._ask(request)
        return stacks

    async def release(self, epoch: int, signed: SignedCall | None = None) -> None:
        await self._ask(calls.Release(**self._of, epoch=epoch, signed=signed))

    async def _ask(self, request: Frozen) -> Any:
        try:
            return await self._ask_cluster(request)
        except ClusterUnreachable as error:
            raise SupervisorUnavailable(str(error)) from error


class SupervisorDesk:
    """Handles of supervisors by attempt, found when they are needed. On the gateway's loop."""

    def __init__(self, find: Callable[[str, int], SupervisorHandle | None]) -> None:
        """`find` blocks."""
        self._find = find
        self._handles: dict[AttemptKey, SupervisorHandle] = {}

    def keep(self, job_id: str, attempt: int, handle: SupervisorHandle) -> None:
        self._handles[job_id, attempt] = handle

    def forget_all(self) -> None:
        """They belong to a connection to Ray that has ended."""
        self._handles.clear()

    async def find(self, job_id: str, attempt: int) -> SupervisorHandle | None:
        self._handles.pop((job_id, attempt), None)
        found = await asyncio.to_thread(self._find, job_id, attempt)
        if found is not None:
            self._handles[job_id, attempt] = found
        return found

    async def answer(self, request: Frozen) -> Any:
        match request:
            case calls.Pull():
                handle = await self._handle(request)
                return await handle.pull(request.after, request.wait_s, request.epoch, request.signed)
            case calls.Direct():
                return await (await self._handle(request)).direct(request.directive, request.signed)
            case calls.TakeStacks():
                handle = await self._handle(request)
                return await handle.stacks(request.rank, request.native, request.epoch, request.signed)
            case calls.Release():
                handle = await self._handle(request)
                self._handles.pop((request.job_id, request.attempt), None)
                return await handle.release(request.epoch, request.signed)
            case _:
                raise TypeError(f"{type(request).__name__} is not a call to a supervisor")

    async def _handle(self, request: calls.OfAttempt) -> SupervisorHandle:
        known = self._handles.get((request.job_id, request.attempt)) or await self.find(request.job_id, request.attempt)
        if known is None:
            raise SupervisorGone("no actor of that name is in the cluster")
        return known
