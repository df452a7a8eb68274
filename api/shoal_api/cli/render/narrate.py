"""An event of a job as a line in a terminal, and its colour. Pure; used by `events`, `submit --follow` and the demo.

The words and the severity come from the server with the event (shoal_service/core/events): an older command line shows
what a newer server reports.
"""

from __future__ import annotations

from shoal_service.core.events.base import Severity
from shoal_service.core.events.catalogue import one_line
from shoal_service.views import EventView


def narrate(event: EventView) -> str:
    """What happened, in one line without control characters."""
    return one_line(event.message)


def style(event: EventView) -> str:
    """The name of its colour in `output.STYLES`."""
    return _STYLES[event.severity]


_STYLES = {Severity.INFO: "plain", Severity.SUCCESS: "good", Severity.WARNING: "warn", Severity.ERROR: "bad"}
