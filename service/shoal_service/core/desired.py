"""What the user wants of a job: the other half of its standing, next to the state that the system has reached."""

from __future__ import annotations

from enum import StrEnum


class Desired(StrEnum):
    RUN = "run"
    PAUSE = "pause"
    CANCEL = "cancel"
    """Cannot be taken back."""
