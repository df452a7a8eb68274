"""The catalogue of events is complete: names, words, severity and a line of documentation for each type."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.cases import failed_cases
from kit.event_examples import EXAMPLES
from kit.sources import relative, sources
from shoal_service.core.events.base import JobEvent, Severity, fill_line
from shoal_service.core.events.catalogue import CATALOGUE, TOPICS, describe, read
from shoal_service.core.events.job import (
    JobGranted,
    JobPatched,
    JobStateChanged,
)
from shoal_service.core.events.training import CheckpointFailed
from shoal_workers.contract.job import JobState
from shoal_workers.contract.layout import ParallelismSpec

W = "job-x/1/3"


def test_no_two_events_have_the_same_name() -> None:
    assert len(CATALOGUE) == sum(len(events) for events in TOPICS.values())


def test_every_event_has_words_severity_and_documentation() -> None:
    def check(event: type[JobEvent]) -> None:
        assert event.text or "describe" in vars(event)
        assert isinstance(event.severity, Severity)
        assert event.__doc__ and event.__doc__ != JobEvent.__doc__

    assert failed_cases(check, CATALOGUE.values()) == {}


def test_every_event_has_an_example_here() -> None:
    assert {event.type for event, _ in EXAMPLES} == set(CATALOGUE)


def test_the_words_of_an_event() -> None:
    def check(example: tuple[JobEvent, str]) -> None:
        event, words = example
        shown = describe(event.type, event.data())
        assert (shown.message, shown.severity) == (words, event.severity_of_this())

    assert failed_cases(check, EXAMPLES) == {}


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("{number:count worker} after {pause_s:duration}, {pause_s:.2f}", "2 workers after 1.5 s, 1.50"),
        ("{names:list}; {names:count node}", "a, b; 2 nodes"),
        ("{values:numbers .3g}", "loss 0.123"),
        ("from step {number:next} on", "from step 3 on"),
        ("{worker_id:worker} with code {code:code}", "worker 3 with code the code before"),
        ("lost[, {none}][, {empty}]", "lost"),
        ("lost[ ({number})][: {none} {number}]", "lost (2)"),
        (
            "[next try in {pause_s:duration}|it ends], [{none}|nothing stands out]",
            "next try in 1.5 s, nothing stands out",
        ),
    ],
)
def test_a_line_is_filled_in(text: str, line: str) -> None:
    fields = {"number": 2, "pause_s": 1.5, "names": ("a", "b"), "values": {"loss": 0.12345}, "none": None, "empty": ""}
    assert fill_line(text, {**fields, "worker_id": W, "code": ""}) == line


def test_an_event_survives_the_store() -> None:
    def check(event: JobEvent) -> None:
        assert read(event.type, json.loads(json.dumps(event.data()))) == event

    assert failed_cases(check, [event for event, _ in EXAMPLES]) == {}


def test_only_the_fields_that_were_set_are_sent() -> None:
    assert CheckpointFailed(message="disk full", rank=None).data() == {"message": "disk full", "rank": None}
    patched = JobPatched(spec_version=2, parallelism=ParallelismSpec(dp_shard=2))
    assert patched.data()["parallelism"] == ParallelismSpec(dp_shard=2).model_dump(mode="json")


def test_a_field_named_like_a_keyword_has_its_plain_name_on_the_wire() -> None:
    assert JobGranted(from_=2, to=1, reason="").data() == {"from": 2, "to": 1, "reason": ""}


@pytest.mark.parametrize(
    ("state", "severity"),
    [
        (JobState.SUCCEEDED, Severity.SUCCESS),
        (JobState.FAILED, Severity.ERROR),
        (JobState.WAITING, Severity.WARNING),
        (JobState.RUNNING, Severity.INFO),
    ],
)
def test_the_severity_of_a_new_state_depends_on_the_state(state: JobState, severity: Severity) -> None:
    event = JobStateChanged(from_=JobState.QUEUED, to=state, reason="", message="")
    assert describe(event.type, event.data()).severity is severity


def test_an_unknown_event_is_shown_with_its_data() -> None:
    assert describe("moon.risen", {"phase": "full"}).message == "moon.risen phase=full"


def test_data_of_another_version_are_shown_as_they_are() -> None:
    shown = describe("worker.lost", {"worker_id": W, "cause": "bitten"})
    assert (shown.message, shown.severity) == (f"worker.lost worker_id={W} cause=bitten", Severity.ERROR)


def test_a_field_of_a_later_version_is_left_out() -> None:
    assert describe("job.created", {"name": "a", "spec_version": 1, "colour": "red"}).message == "job created as a"


def test_control_characters_are_left_out_of_the_words() -> None:
    assert (
        describe("worker.released", {"worker_id": "a\x1b[31m\nb", "reason": "\x00"}).message
        == "worker a [31m b released:"
    )


@given(
    st.sampled_from(sorted(CATALOGUE)),
    st.dictionaries(st.text(), st.none() | st.integers() | st.text() | st.lists(st.floats())),
)
def test_no_data_make_the_words_fail(name: str, data: dict[str, object]) -> None:
    assert "\n" not in describe(name, data).message


def test_no_name_of_an_event_is_spelled_outside_of_the_catalogue() -> None:
    names = "|".join(re.escape(name) for name in CATALOGUE if "." in name)
    literal = re.compile(f'"(?:{names})"')
    spelled = [f"{relative(path)}: {match[0]}" for path, text in _sources().items() for match in literal.finditer(text)]
    assert spelled == []


def test_every_event_class_is_declared_in_a_topic_of_the_catalogue() -> None:
    declared = re.compile(r"^\s*class \w+\([^)]*\bJobEvent\b", re.M)
    assert [relative(path) for path, text in _sources().items() if declared.search(text)] == []


def test_every_event_of_the_catalogue_is_emitted_somewhere() -> None:
    called = {name for text in _sources().values() for name in re.findall(r"\b([A-Z]\w+)\(", text)}
    assert {event.__name__ for event in CATALOGUE.values()} <= called


def _sources() -> dict[Path, str]:
    product = sources("service/shoal_service", "api/shoal_api")
    return {path: text for path, text in product.items() if path.parent.parts[-2:] != ("core", "events")}
