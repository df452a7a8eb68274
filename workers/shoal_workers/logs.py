"""Log events: one line per event, with job, attempt, generation and rank as fields, as text or as JSON.

`set_up_logs` is called once per process, by a composition root: `shoal serve`, the supervisor's actor, the worker's.
Code that logs uses the standard library: a fixed event name, and fields in `extra`:

    _log.warning("journal.delete_failed", extra={"error": str(error)})

    2026-11-23 08:15:02.118 WARNING journal.delete_failed job=j1 attempt=1 generation=3 error="no answer"
    {"at": "2026-11-23T08:15:02.118Z", "level": "warning", "event": "journal.delete_failed", "job": "j1", ...}

Importing this module sets up nothing.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TextIO

from shoal_workers.contract.log_settings import LogFormat, LogSettings

ALL_LOGGERS = ("",)
"""The root: also what libraries log."""
SHOAL_LOGGERS = ("shoal_api", "shoal_service", "shoal_workers")
"""Shoal's own events. In processes that run user code, whose logging is left alone."""
_FIRST = ("job", "attempt", "generation", "rank")
_NOT_FIELDS = frozenset({*logging.makeLogRecord({}).__dict__, "asctime", "message", "taskName", "color_message"})
_ACCESS_LOGGER = "uvicorn.access"
_ACCESS_FIELDS = ("client", "method", "path", "http_version", "status")
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./:+,@[]()*%")

Fields = Mapping[str, object]


def set_up_logs(
    settings: LogSettings,
    *,
    loggers: Sequence[str] = ALL_LOGGERS,
    context: Callable[[], Fields] = dict,
) -> None:
    """Write the events of these loggers to stderr. A second call replaces the first one's handlers.

    Args:
        context: fields of every event of this process, read when an event is logged. An event's own fields win.
    """
    for name in loggers:
        logger = logging.getLogger(name)
        for handler in logger.handlers[:]:
            if isinstance(handler, _StderrHandler):
                logger.removeHandler(handler)
        handler = _StderrHandler()
        handler.setFormatter(EventFormatter(settings.format, context))
        logger.addHandler(handler)
        logger.setLevel(settings.level.upper())
        if name:
            logger.propagate = False


class EventFormatter(logging.Formatter):
    """One line per event. In text, a traceback follows on indented lines; in JSON it is a field."""

    def __init__(self, log_format: LogFormat, context: Callable[[], Fields] = dict) -> None:
        super().__init__()
        self._format = log_format
        self._context = context

    def format(self, record: logging.LogRecord) -> str:
        event, fields = _event_of(record)
        known = {**self._context(), **fields}
        ordered = {name: known[name] for name in (*(f for f in _FIRST if f in known), *known)}
        shown = {name: value for name, value in ordered.items() if value is not None}
        traceback = self.formatException(record.exc_info) if record.exc_info and record.exc_info[0] else ""
        at = datetime.fromtimestamp(record.created, UTC)
        if self._format is LogFormat.JSON:
            stamp = at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
            line = {"at": stamp, "level": record.levelname.lower(), "event": event, **shown, "logger": record.name}
            return json.dumps({**line, "traceback": traceback} if traceback else line, default=str)
        stamp = at.strftime("%Y-%m-%d %H:%M:%S.") + f"{at.microsecond // 1000:03d}"
        message = [stamp, record.levelname, event, *(f"{name}={_text(value)}" for name, value in shown.items())]
        return " ".join(message) + "".join(f"\n    {line}" for line in traceback.splitlines())


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to what `sys.stderr` is when an event is logged: a worker replaces it, to show its log lines to users."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, stream: TextIO) -> None:
        raise AttributeError("the stream is always sys.stderr")


def _event_of(record: logging.LogRecord) -> tuple[str, dict[str, object]]:
    """Return the event's name and its own fields. A library's message is its event."""
    fields = {name: value for name, value in record.__dict__.items() if name not in _NOT_FIELDS and name[0] != "_"}
    if record.name == _ACCESS_LOGGER and isinstance(record.args, tuple) and len(record.args) == len(_ACCESS_FIELDS):
        return "http.request", {**dict(zip(_ACCESS_FIELDS, record.args, strict=True)), **fields}
    return " ".join(record.getMessage().split()), fields


def _text(value: object) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if text and _PLAIN.issuperset(text) else json.dumps(text, ensure_ascii=False)
