"""Tee: a text stream of the worker's process that also copies whole lines to the outbox, for `shoal logs`.

Installed as `sys.stdout` and `sys.stderr` by the worker's actor. It must never raise because of what user code prints,
and it holds at most one shortened line, however much is printed without an end of line.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TextIO

from shoal_workers.contract.messages import LogLine, LogStream
from shoal_workers.engine.process.outbox import Outbox

MAX_LINE_CHARS = 4000
"""The rest of a longer line is left out of the job's log."""


class Tee:
    """Any thread may write."""

    def __init__(
        self, stream: TextIO, name: LogStream, outbox: Outbox, mask: Callable[[str], str] = lambda text: text
    ) -> None:
        """`mask` replaces what nobody may see. In the stream itself a text is masked that is written at once."""
        self._stream = stream
        self._mask = mask
        self._name = name
        self._outbox = outbox
        self._partial = ""
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        """The number of characters. Lines are shown as a terminal shows them: text after a carriage return replaces
        what is before it, so of a progress bar the last state remains."""
        with self._lock:
            *lines, last = text.split("\n")
            if lines:
                lines[0] = self._partial + lines[0]
                self._partial = ""
            self._partial = _visible(self._partial + last)
        for line in lines:
            shown = _visible(line).removesuffix("\r")
            if shown:
                self._outbox.log(LogLine(at=time.time(), stream=self._name, text=self._mask(shown)))
        masked = self._mask(text)
        try:
            self._stream.write(masked)
        except UnicodeEncodeError:  # Python's own stdout raises here, and its stderr does this
            self._stream.write(masked.encode(self._stream.encoding or "utf-8", "backslashreplace").decode())
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _visible(line: str) -> str:
    """The text after the last carriage return, at most MAX_LINE_CHARS of it. One at the end is kept: it may belong to
    the end of the line, or the next text replaces this one."""
    end = "\r" if line.endswith("\r") else ""
    text = line.rstrip("\r")
    return text[text.rfind("\r") + 1 :][:MAX_LINE_CHARS] + end
