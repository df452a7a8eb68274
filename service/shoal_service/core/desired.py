"""What the user wants of a job. The store keeps it beside the state that the system has reached; supervisors get it."""

from __future__ import annotations

from enum import StrEnum


class Desired(StrEnum):
    RUN = "run"
    PAUSE = "pause"
    CANCEL = "cancel"
    """Final: a cancelled job cannot be resumed."""
