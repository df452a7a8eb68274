"""Text of a task that is no UTF-8, or that a database does not store, is made plain at one door."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_workers.contract.messages import ErrorReport, LogLine, LogStream, Phase, Progress
from shoal_workers.contract.plain_text import plain, plain_text
from shoal_workers.contract.worker_reports import StepReport, ValidationReport

ODD = "caf\udce9\x00"
PLAIN = "caf\\udce9\\x00"


@given(st.text(st.characters(categories=None)))
def test_plain_text_has_a_utf_8_form_and_no_nul(text: str) -> None:
    made = plain_text(text)
    assert "\x00" not in made and made.encode().decode() == made
    if "\x00" not in text and not any("\ud800" <= c <= "\udfff" for c in text):
        assert made == text


def test_keys_and_nested_values_are_made_plain_and_others_stay() -> None:
    found = plain({ODD: [ODD, (ODD, 1.5, None)], "é": "日本"})
    assert found == {PLAIN: [PLAIN, (PLAIN, 1.5, None)], "é": "日本"}


def test_messages_of_a_task_are_plain_once_they_are_made() -> None:
    error = ErrorReport(type=f"E{ODD}", message=ODD, traceback=ODD, phase=Phase.FORWARD, line=ODD)
    assert (error.type, error.message, error.traceback, error.line) == (f"E{PLAIN}", PLAIN, PLAIN, PLAIN)
    assert LogLine(at=0.0, stream=LogStream.STDOUT, text=ODD).text == PLAIN
    assert Progress(generation=1, phase=Phase.IDLE, step=0, at=0.0, note=ODD).note == PLAIN


@pytest.mark.parametrize("kind", [StepReport, ValidationReport])
def test_names_of_metrics_are_plain(kind: type[StepReport] | type[ValidationReport]) -> None:
    required = {name: 1 for name, field in kind.model_fields.items() if field.is_required()}
    report = kind(**required, metrics={ODD: 1.0})
    assert list(report.metrics) == [PLAIN] and report.model_dump_json()
