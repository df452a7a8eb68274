"""Notifier: one event to a mail account or a chat, through apprise (`pip install 'shoal[apprise]'`).

Called by LaneDelivery. The URL is a secret: neither it nor what apprise logs about it leaves this module. apprise is
imported with the first message; its calls block, and run on threads of their own.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging

from shoal_service.control.webhooks.message import JobFacts, message_id
from shoal_service.control.webhooks.threads import Threads
from shoal_service.core.events.base import Severity
from shoal_service.views import EventView

MISSING = "the service has no apprise: install it where `shoal serve` runs, with pip install 'shoal[apprise]'"
_THREADS = 4
_TYPES = {Severity.SUCCESS: "success", Severity.WARNING: "warning", Severity.ERROR: "failure"}


def is_installed() -> bool:
    return importlib.util.find_spec("apprise") is not None


class Notifier:
    """Used on the event loop. Close it after use."""

    def __init__(self, answer_s: float) -> None:
        """`answer_s`: seconds for a whole attempt."""
        self._answer_s = answer_s
        self._threads = Threads(_THREADS)

    async def send(self, url: str, event: EventView, job: JobFacts) -> str:
        """Empty: it is sent. Otherwise why not, in words without the URL."""
        if not is_installed():
            return f"was not called: {MISSING}"
        title = f"{job.name}: {event.type}"
        text = f"{event.message}\n\njob {job.id} ({job.name}), project {job.project}, user {job.user}; event "
        text += message_id(job.id, event.seq)
        try:
            async with asyncio.timeout(self._answer_s):
                return await self._threads(_send, url, title, text, _TYPES.get(event.severity, "info"))
        except TimeoutError:
            return f"has not answered within {self._answer_s:g} s"

    def close(self) -> None:
        self._threads.close()


def _send(url: str, title: str, text: str, type_: str) -> str:
    from apprise import Apprise

    for name in ("apprise", "urllib3"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)  # their lines have parts of the URL
    try:
        receiver = Apprise()
        if not receiver.add(url):
            return "was not called: the secret is not a URL that apprise knows"
        return "" if receiver.notify(body=text, title=title, notify_type=type_) else "has not accepted it"
    except Exception as error:  # of more than a hundred plug-ins; the message may have the URL in it
        return f"has failed in apprise ({type(error).__name__})"
