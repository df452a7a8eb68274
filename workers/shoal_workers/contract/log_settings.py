"""How a process writes its log. Set in the control plane's settings, and passed on to supervisors and workers."""

from __future__ import annotations

from enum import StrEnum

from shoal_workers.contract.base import Frozen


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    TEXT = "text"
    """For people: time, level, event, then field=value."""
    JSON = "json"
    """One JSON object per line."""


class LogSettings(Frozen):
    level: LogLevel = LogLevel.INFO
    """Events below this level are not written."""
    format: LogFormat = LogFormat.TEXT
