"""RaySupervisorHandle: the calls to one supervisor's actor, with Ray's errors as those of `cluster/errors.py`.

Made by `ray_cluster.py`, called by the gateway, which has no private key: it carries signed calls as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, ActorUnschedulableError, RayActorError, RayError

import ray
from shoal_service.cluster.errors import SupervisorGone, SupervisorUnavailable
from shoal_service.gateway.releases import other_releases
from shoal_service.reports import SupervisorReports
from shoal_service.signing.calls import SignedCall
from shoal_service.supervisor.config import Directive
from shoal_workers.contract.messages import Stacks

_NOT_CREATED = "creation task"
"""In Ray's words for an actor whose constructor raised, or whose class could not be imported."""


class RaySupervisorHandle:
    """The real `SupervisorHandle`."""

    def __init__(self, actor: ActorHandle) -> None:
        self._actor = actor

    async def pull(self, after: int, wait_s: float, epoch: int, signed: SignedCall | None = None) -> SupervisorReports:
        reports: SupervisorReports
        try:
            with supervisor_errors():
                if signed is not None:
                    reports = await self._actor.signed_pull.remote(signed)
                else:
                    reports = await self._actor.pull.remote(after, wait_s, epoch)
        except SupervisorGone as error:
            if _NOT_CREATED not in str(error):
                raise
            raise SupervisorGone(f"{error}{await other_releases()}") from error
        return reports

    async def direct(self, directive: Directive, signed: SignedCall | None = None) -> None:
        with supervisor_errors():
            if signed is not None:
                await self._actor.signed_direct.remote(signed)
            else:
                await self._actor.direct.remote(directive)

    async def stacks(
        self, rank: int | None, native: bool, epoch: int, signed: SignedCall | None = None
    ) -> Stacks | None:
        stacks: Stacks | None
        with supervisor_errors():
            if signed is not None:
                stacks = await self._actor.signed_stacks.remote(signed)
            else:
                stacks = await self._actor.stacks.remote(rank, native, epoch)
        return stacks

    async def release(self, epoch: int, signed: SignedCall | None = None) -> None:
        try:
            if signed is not None:
                await self._actor.signed_release.remote(signed)
            else:
                await self._actor.release.remote(epoch)
        except RayError:
            pass  # it has ended; `reap` deletes its journal entry
        ray.kill(self._actor, no_restart=True)


@contextmanager
def supervisor_errors() -> Iterator[None]:
    """Ray's errors as those of `cluster/errors.py`."""
    try:
        yield
    except ActorUnavailableError as error:
        raise SupervisorUnavailable(str(error)) from error
    except (RayActorError, ActorUnschedulableError) as error:  # the second: Ray could not start a process for it
        raise SupervisorGone(str(error)) from error
