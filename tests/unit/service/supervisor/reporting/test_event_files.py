"""TensorBoard event files: each value once, replaced when a step is computed again, and never in the way."""

import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from shoal_service.core.downsampling import SeriesPoint
from shoal_service.supervisor.reporting.reporter import EventFiles
from shoal_workers.contract.checks.spec_errors import SpecError, parse_spec

_PATIENCE_S = 60.0


def point(step: int, **values: Any) -> SeriesPoint:
    known = {"grad_norm": 1.0, "lr": 0.5, "tokens_per_s": 8.0, "step_s": 0.25, "world_size": 2, "generation": 1}
    return SeriesPoint(step=step, at=10.0 + step, **{"loss": float(step), **known, **values})


def written(root: Path, *points: SeriesPoint) -> list[Event]:
    """What a run with these points leaves in the only file."""
    said: list[str] = []
    files = EventFiles(str(root), said.append)
    for point in points:
        files.add(point)
    files.close()
    assert files.wait(_PATIENCE_S) and said == []
    [file] = (root / "tensorboard").iterdir()
    assert file.name.startswith("events.out.tfevents.")
    return list(events_of(file.read_bytes()))


def events_of(data: bytes) -> Iterator[Event]:
    """The records of a file, without the first, which names its version."""
    position = 0
    while position < len(data):
        (length,) = struct.unpack_from("<Q", data, position)
        event = Event.FromString(data[position + 12 : position + 12 + length])
        position += 12 + length + 4
        if not event.file_version:
            yield event


def values_of(event: Event) -> dict[str, float]:
    return {value.tag: value.simple_value for value in event.summary.value}


def test_each_step_has_its_values_and_those_of_the_task(tmp_path: Path) -> None:
    begin, first, second = written(
        tmp_path, point(1, metrics={"acc/top-1": 0.25}), point(2, loss=math.nan, metrics={"acc/top-1": 0.5})
    )
    assert (begin.step, begin.session_log.status) == (1, SessionLog.START)
    assert (first.step, first.wall_time) == (1, 11.0)
    assert values_of(first) == {
        "loss": 1.0,
        "grad_norm": 1.0,
        "lr": 0.5,
        "tokens_per_s": 8.0,
        "step_s": 0.25,
        "world_size": 2.0,
        "metrics/acc/top-1": 0.25,
    }  # fmt: skip - a table
    assert "loss" not in values_of(second) and values_of(second)["metrics/acc/top-1"] == 0.5


def test_a_validation_adds_its_values_to_a_step_without_repeating_the_others(tmp_path: Path) -> None:
    *_, validated = written(tmp_path, point(1), point(1, val_loss=0.75, val_metrics={"f1": 0.5}))
    assert validated.step == 1
    assert values_of(validated) == {"val_loss": 0.75, "val_metrics/f1": 0.5}


def test_steps_that_are_computed_again_replace_the_ones_before(tmp_path: Path) -> None:
    events = written(tmp_path, point(1), point(2), point(3), point(2, generation=2), point(3, generation=2))
    assert [(event.step, event.HasField("session_log")) for event in events] == [
        (1, True),
        (1, False),
        (2, False),
        (3, False),
        (2, True),
        (2, False),
        (3, False),
    ]  # fmt: skip - a table


@pytest.mark.parametrize("root", ["s3://bucket/job", "FILE"])
def test_what_cannot_be_written_is_said_once_and_stops_nothing(tmp_path: Path, root: str) -> None:
    (tmp_path / "file").touch()
    said: list[str] = []
    files = EventFiles(root.replace("FILE", str(tmp_path / "file")), said.append)
    files.add(point(1))
    assert files.wait(_PATIENCE_S)
    files.add(point(2))
    files.close()
    assert len(said) == 1 and said[0].startswith("no TensorBoard event files")


def test_a_spec_with_event_files_in_an_object_store_is_refused_with_the_way_out() -> None:
    with pytest.raises(SpecError, match=r"event files are appended to\. Set checkpoint\.url to a directory"):
        parse_spec({"stop": {"steps": 1}, "task": "m:T", "checkpoint": {"url": "s3://b/c", "tensorboard": True}})


def test_a_linked_folder_is_not_written_into(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "tensorboard").symlink_to(tmp_path / "elsewhere")
    said: list[str] = []
    files = EventFiles(str(tmp_path / "job"), said.append)
    files.close()
    assert files.wait(_PATIENCE_S) and "symbolic links are not followed" in said[0]
    assert list((tmp_path / "elsewhere").iterdir()) == []
