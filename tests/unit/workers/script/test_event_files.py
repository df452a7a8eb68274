"""TensorBoard's event files of a script become messages as those of `shoal.log`."""

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboardX.proto.tensor_pb2 import TensorProto

from shoal_workers.script.event_files import EventFiles

BEGAN = 1_000.0


class Script:
    """Writes to a folder as a script does, and what is read of it."""

    def __init__(self, folder: Path) -> None:
        self.writer = _writer(folder / "runs" / "first")
        self.now = 0.0
        folders = (str(folder), str(folder / "missing"), "s3://bucket/job", "")
        self.files = EventFiles(folders, BEGAN, lambda: self.now)

    def add(self, step: int, at: float | None = None, **values: float) -> None:
        for name, value in values.items():
            self.writer.write_event(_event(step, name.replace("__", "/"), value, at))
        self.writer.flush()

    def messages(self, after_s: float = 1.0) -> list[dict[str, Any]]:
        """Those of one look more, so many seconds later."""
        self.now += after_s
        return self.files.messages()


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Script]:
    one = Script(tmp_path)
    yield one
    one.writer.close()


def test_the_scalars_of_a_step_are_one_message_once_those_of_the_next_are_there(script: Script) -> None:
    script.add(1, train__loss=0.5, lr=0.25, accuracy=0.75)
    script.add(2, train__loss=0.25)
    assert script.messages() == [
        {"step": 1, "at": BEGAN + 1, "loss": 0.5, "lr": 0.25, "metrics": {"accuracy": 0.75}},
    ]
    script.add(2, val__loss=2.0)
    assert script.messages() == []
    assert script.messages(after_s=5.0) == [{"step": 2, "at": BEGAN + 2, "loss": 0.25, "metrics": {"val/loss": 2.0}}]
    assert script.messages() == []


def test_at_the_end_the_last_step_is_read_without_waiting(script: Script) -> None:
    script.add(1, loss=0.5)
    assert [one["step"] for one in script.files.messages(is_last=True)] == [1]


def test_files_of_several_writers_are_read_together(script: Script, tmp_path: Path) -> None:
    other = _writer(tmp_path / "lightning_logs" / "version_0")
    script.add(1, loss=0.5)
    other.write_event(_event(1, "reward", 3.0))
    other.close()
    assert script.files.messages(is_last=True) == [
        {"step": 1, "at": BEGAN + 1, "loss": 0.5, "metrics": {"reward": 3.0}}
    ]


def test_what_another_generation_has_written_is_not_read(script: Script, tmp_path: Path) -> None:
    script.add(1, at=BEGAN - 10, loss=0.5)
    script.add(2, loss=0.25)
    old = tmp_path / "events.out.tfevents.1.host"
    old.write_bytes(_record(_event(3, "loss", 1.0)))
    os.utime(old, (BEGAN - 100, BEGAN - 100))
    assert [one["step"] for one in script.files.messages(is_last=True)] == [2]


def test_a_record_is_read_once_all_of_it_is_there(tmp_path: Path) -> None:
    record = _record(_event(1, "loss", 0.5))
    file = tmp_path / "events.out.tfevents.1.host"
    file.write_bytes(record[:-1])
    files = EventFiles((str(tmp_path),), BEGAN)
    assert files.messages(is_last=True) == []
    file.write_bytes(record)
    assert [one["loss"] for one in files.messages(is_last=True)] == [0.5]


def test_other_kinds_of_values_and_damaged_files_do_no_harm(tmp_path: Path) -> None:
    scalars = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="scalars"))
    tensor = TensorProto(dtype=1, tensor_content=struct.pack("<f", 0.5))
    values = [Summary.Value(tag="loss", metadata=scalars, tensor=tensor), Summary.Value(tag="text")]
    good = _record(Event(step=1, wall_time=BEGAN, summary=Summary(value=values)))
    folder = tmp_path / "runs"
    folder.mkdir()
    (folder / "events.out.tfevents.1.host").write_bytes(_framed(b"\xff\xff no event") + good)
    (folder / "events.out.tfevents.2.host").write_bytes(b"\xff" * 64)
    (folder / "events.out.tfevents.3.host").symlink_to(folder / "nowhere")
    [message] = EventFiles((str(tmp_path),), BEGAN).messages(is_last=True)
    assert message == {"step": 1, "at": BEGAN, "loss": 0.5, "metrics": {}}


def test_between_two_looks_no_file_is_touched(script: Script) -> None:
    assert script.messages() == []
    script.add(1, loss=0.5)
    script.add(2, loss=0.5)
    assert script.messages(after_s=0.5) == []
    assert script.files.next_mono == script.now + 0.5
    assert len(script.messages(after_s=0.5)) == 1


def test_a_record_of_which_a_part_is_there_keeps_its_step_open(tmp_path: Path) -> None:
    now = [0.0]
    loss, lr = _record(_event(1, "loss", 0.5)), _record(_event(1, "lr", 0.25))
    file = tmp_path / "events.out.tfevents.1.host"
    file.write_bytes(loss + lr[:-1])
    files = EventFiles((str(tmp_path),), BEGAN, lambda: now[0])
    for now[0] in (1.0, 60.0):
        assert files.messages() == []
    file.write_bytes(loss + lr)
    now[0] = 61.0
    assert files.messages() == []
    now[0] = 66.0
    assert [(one["loss"], one["lr"]) for one in files.messages()] == [(0.5, 0.25)]


def _writer(folder: Path) -> Any:
    folder.mkdir(parents=True)
    return EventsWriter(str(folder / "events"))


def _event(step: int, tag: str, value: float, at: float | None = None) -> Event:
    values = [Summary.Value(tag=tag, simple_value=value)]
    return Event(step=step, wall_time=at or BEGAN + step, summary=Summary(value=values))


def _record(event: Event) -> bytes:
    return _framed(event.SerializeToString())


def _framed(data: bytes) -> bytes:
    return struct.pack("<QI", len(data), 0) + data + bytes(4)


def test_a_file_that_a_new_writer_has_begun_again_is_read_from_its_beginning(tmp_path: Path) -> None:
    """A process that is started again within a second writes to the file of the one before."""
    script = Script(tmp_path)
    script.add(1, at=BEGAN - 5, loss=9.0)
    assert script.messages() == []
    script.writer.close()
    [file] = (tmp_path / "runs" / "first").iterdir()
    after = _writer(tmp_path / "elsewhere")
    for step in range(2, 20):
        after.write_event(_event(step, "loss", 0.5, None))
    after.close()
    [written] = (tmp_path / "elsewhere").iterdir()
    assert written.stat().st_size > file.stat().st_size
    with file.open("r+b") as same:
        same.truncate()
        same.write(written.read_bytes())
    written.unlink()
    assert [one["step"] for one in script.files.messages(is_last=True)] == [*range(2, 20)]
