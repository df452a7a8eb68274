"""Events that releases before this one have stored, and that none emits any more: they stay readable."""

from __future__ import annotations

from typing import ClassVar

from shoal_service.core.events.base import JobEvent, Severity


class SupervisorRefusedCall(JobEvent):
    """A call to the supervisor was not obeyed, since the control plane has not signed it for this attempt. The first
    one of a call and reason is reported at once, further ones once a minute."""

    type: ClassVar[str] = "supervisor.call_refused"
    severity: ClassVar[Severity] = Severity.WARNING

    call: str
    """`pull`, `direct`, `stacks` or `release`."""
    refusal: str
    """`unsigned`, `forged`, `misdirected` or `replayed`."""
    number: int
    """Calls with this name that this supervisor has refused for this reason so far."""
    message: str

    def words(self) -> str:
        return self.message + (f" ({self.number} so far)" if self.number > 1 else "")
