from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_api.cli.render.narrate import narrate, seconds, severity, size_text
from shoal_service.views import EventView


def event(kind: str, **data: object) -> EventView:
    return EventView(seq=1, at=0, type=kind, data=data)


@pytest.mark.parametrize(
    ("said", "line"),
    [
        (event("job.state", **{"from": "RUNNING", "to": "PAUSED", "reason": "asked"}), "job RUNNING -> PAUSED (asked)"),
        (event("generation.formed", generation=2, workers=3, layout="fsdp3", start_step=20),
         "generation 2: 3 workers as fsdp3, from step 20"),
        (event("incident.opened", cause="worker_died", ranks=[2]), "incident: worker_died rank 2"),
        (event("incident.closed", from_workers=4, to_workers=3, detect_s=0.03, recovery_s=1.5, steps_lost=1,
               state_source="memory"),
         "incident closed: 4 -> 3 workers, detected in 30 ms, recovered in 1.5 s, 1 steps lost, state from memory"),
        (event("generation.forming", generation=2, workers=3, source="memory", step=41, restore="step-40"),
         "forming generation 2 with 3 workers, from memory, step 41"),
        (event("worker.straggler", worker_id="j/1/3", rank=3, compute_s=1.0, median_s=0.2),
         "worker 3 rank 3 is slow: 1.0 s a step, the others 200 ms"),
        (event("node.suspected", node_id="ab12", reason="it hung"), "node ab12 is suspected: it hung"),
        (event("checkpoint.committed", step=20, bytes=2048, seconds=0.5),
         "checkpoint of step 20 committed in 500 ms, 2.0 KiB"),
        (event("worker.lost", worker_id="worker-2", rank=2, pid=7), "worker worker-2 rank 2 lost (pid 7)"),
    ],
)  # fmt: skip
def test_known_events_read_as_sentences(said: EventView, line: str) -> None:
    assert narrate(said) == line


def test_an_unknown_event_is_shown_with_its_data() -> None:
    assert narrate(event("moon.risen", phase="full")) == "moon.risen phase=full"


def test_control_characters_never_reach_the_terminal() -> None:
    assert narrate(event("worker.lost", worker_id="a\x1b[31m\nb")) == "worker a [31m b lost"


@given(
    st.sampled_from(["job.state", "generation.formed", "incident.opened", "incident.closed", "checkpoint.committed"]),
    st.dictionaries(st.sampled_from(["from", "to", "step", "workers", "detect_s", "cause", "message"]), st.text()),
)
def test_no_data_of_a_known_event_can_break_the_line(kind: str, data: dict[str, str]) -> None:
    line = narrate(event(kind, **data))
    assert line
    assert "\n" not in line
    severity(event(kind, **data))


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "?"), (0.03, "30 ms"), (1.26, "1.3 s"), (42, "42 s"), (200, "3 min 20 s"), (7500, "2 h 05 min")],
)
def test_durations_are_rounded_for_people(value: float | None, text: str) -> None:
    assert seconds(value) == text


def test_sizes_have_binary_units() -> None:
    assert [size_text(n) for n in (10, 2048, 5 * 2**20)] == ["10 B", "2.0 KiB", "5.0 MiB"]
