"""SupervisorCalls: what a driver asks of its attempt's supervisor, signed if the attempt has a key.

Made by a driver, which gets the key from the store, or makes one before it starts the supervisor. Decision 0045.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shoal_service.clusters.supervisor_calls import SupervisorHandle
from shoal_service.reports import SupervisorReports
from shoal_service.signing.calls import CallName, SignedCall
from shoal_service.signing.signer import Signer
from shoal_service.supervisor.config import Directive
from shoal_workers.contract.messages import Stacks


class SupervisorCalls:
    """One supervisor, as it is called by one control plane in one lease epoch. See `SupervisorHandle` for errors."""

    def __init__(self, handle: SupervisorHandle, signer: Signer | None, epoch: int, numbers: Iterator[int]) -> None:
        """
        Args:
            numbers: those of directives; they rise over all drivers of the epoch.
        """
        self._handle = handle
        self._signer = signer
        self._epoch = epoch
        self._numbers = numbers

    async def pull(self, after: int, wait_s: float) -> SupervisorReports:
        signed = self._signed(CallName.PULL, after=after, wait_s=wait_s)
        return await self._handle.pull(after, wait_s, self._epoch, signed)

    async def direct(self, directive: Directive) -> None:
        if self._signer is None:
            await self._handle.direct(directive)
            return
        numbered = directive.model_copy(update={"number": next(self._numbers)})
        signed = self._signer.sign(CallName.DIRECT, numbered.model_dump(mode="json"))
        await self._handle.direct(numbered, signed)

    async def stacks(self, rank: int | None, native: bool) -> Stacks | None:
        signed = self._signed(CallName.STACKS, rank=rank, native=native)
        return await self._handle.stacks(rank, native, self._epoch, signed)

    async def release(self) -> None:
        await self._handle.release(self._epoch, self._signed(CallName.RELEASE))

    def _signed(self, name: CallName, **arguments: Any) -> SignedCall | None:
        return self._signer.sign(name, arguments) if self._signer is not None else None
