from __future__ import annotations

import pytest

from shoal_api.cli.output import STYLES
from shoal_api.cli.render.narrate import narrate, style
from shoal_service.core.events.base import Severity
from shoal_service.views import EventView


def event(message: str, severity: Severity = Severity.INFO) -> EventView:
    return EventView(seq=1, at=0, type="moon.risen", severity=severity, message=message)


def test_an_event_is_shown_in_the_words_of_the_server() -> None:
    assert narrate(event("the moon has risen")) == "the moon has risen"


def test_control_characters_never_reach_the_terminal() -> None:
    assert narrate(event("worker a\x1b[31m\nb lost")) == "worker a [31m b lost"


@pytest.mark.parametrize("severity", Severity)
def test_every_severity_has_a_style(severity: Severity) -> None:
    assert style(event("", severity)) in STYLES
