"""The class of an error, texts that a database does not store, and names of checkpoint directories."""

import errno

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_workers.contract.exception_causes import (
    ERRNOS,
    MISTAKES,
    TEXTS,
    ErrorClass,
    Frame,
    FrameOwner,
    Link,
    Origin,
    error_class_of,
    origin_of,
)
from shoal_workers.contract.marker import CheckpointName, CommitMarker
from shoal_workers.contract.messages import ErrorReport, LogLine, LogStream, Phase, Progress
from shoal_workers.contract.plain_text import plain, plain_text
from shoal_workers.contract.worker_reports import SavedFile, StepReport, ValidationReport

TASK = Frame(FrameOwner.TASK)
ENGINE = Frame(FrameOwner.ENGINE)
REFUSAL = Frame(FrameOwner.ENGINE, is_refusal=True)
TORCH = Frame(FrameOwner.LIBRARY)
DISTRIBUTED = Frame(FrameOwner.LIBRARY, is_communication=True)


@pytest.mark.parametrize("row", TEXTS, ids=lambda row: row.example[:40])
def test_each_text_of_the_table_has_the_class_of_its_row(row: object) -> None:
    assert error_class_of([Link("RuntimeError", row.example)]) == row.error_class  # type: ignore[attr-defined]
    assert row.source  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("CUDA error: an illegal instruction was encountered", ErrorClass.DEVICE),
        ("CUDA error: misaligned address", ErrorClass.DEVICE),
        ("CUDA error: uncorrectable NVLink error detected during the execution", ErrorClass.DEVICE),
        ("cuda runtime error (4) : unspecified launch failure at /pytorch/THCTensorCopy.cu:85", ErrorClass.DEVICE),
        ("CUDA error: all CUDA-capable devices are busy or unavailable", ErrorClass.DEVICE),
        ("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.", ErrorClass.DEVICE),
        ("CUDNN_STATUS_EXECUTION_FAILED", ErrorClass.DEVICE),
        ("CUDA error: out of memory", ErrorClass.DEVICE_MEMORY),
        ("NCCL error in: x.cpp:1, unhandled system error, NCCL version 2.20.5", ErrorClass.NETWORK),
        ("Connection closed by peer [127.0.0.1]:5", ErrorClass.PLAIN),
        ("mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)", ErrorClass.PLAIN),
        ("the CUDA errors of my own", ErrorClass.PLAIN),
        ("expected 3 channels", ErrorClass.PLAIN),
    ],
)
def test_the_class_of_other_texts(message: str, expected: ErrorClass) -> None:
    assert error_class_of([Link("RuntimeError", message)]) is expected


@pytest.mark.parametrize("number", sorted(ERRNOS))
def test_an_error_number_of_the_node_is_the_systems(number: int) -> None:
    expected = ErrorClass.HOST_MEMORY if number == errno.ENOMEM else ErrorClass.SYSTEM
    assert error_class_of([Link("OSError", "whatever", number)]) is expected


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES, errno.EEXIST, errno.EINVAL])
def test_an_error_number_that_a_wrong_path_gives_is_plain(number: int) -> None:
    assert error_class_of([Link("FileNotFoundError", "No space left on device", number)]) is ErrorClass.PLAIN


def test_the_type_decides_where_the_text_says_nothing() -> None:
    assert error_class_of([Link("MemoryError", "")]) is ErrorClass.HOST_MEMORY
    assert error_class_of([Link("torch.OutOfMemoryError", "no")]) is ErrorClass.DEVICE_MEMORY


def test_an_exception_has_the_class_of_what_it_was_raised_from() -> None:
    chain = [Link("ValueError", "cannot read sample 3"), Link("OSError", "", errno.EIO)]
    assert error_class_of(chain) is ErrorClass.SYSTEM


@pytest.mark.parametrize(
    ("frames", "in_task_call", "origin"),
    [
        ([ENGINE, TASK], True, Origin.TASK),
        ([ENGINE, TASK, TORCH], True, Origin.TASK),
        ([ENGINE, TASK, TORCH, DISTRIBUTED], True, Origin.TASK),
        ([ENGINE, TASK, TORCH, ENGINE], True, Origin.ENGINE),  # a hook of the engine in the task's forward pass
        ([ENGINE, TASK, ENGINE, TASK], True, Origin.TASK),
        ([ENGINE, TASK, ENGINE, TASK], False, Origin.TASK),
        ([ENGINE, TORCH], True, Origin.TASK),  # a backward pass: the graph is the task's
        ([ENGINE, TORCH, DISTRIBUTED], True, Origin.TASK),
        ([ENGINE, DISTRIBUTED], True, Origin.ENGINE),
        ([ENGINE], True, Origin.ENGINE),
        ([REFUSAL], True, Origin.TASK),  # "loss() must return a scalar tensor"
        ([REFUSAL], False, Origin.ENGINE),
        ([ENGINE, TORCH], False, Origin.ENGINE),
        ([], True, Origin.TASK),
        ([], False, Origin.ENGINE),
    ],
)
def test_the_innermost_frame_that_is_no_librarys_decides_the_origin(
    frames: list[Frame], in_task_call: bool, origin: Origin
) -> None:
    assert origin_of(frames, in_task_call=in_task_call) is origin


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


NAMES = st.builds(CheckpointName, st.integers(0, 10**15), st.integers(0, 10**6), st.integers(0, 10**6))


@given(NAMES)
def test_a_name_is_read_back(name: CheckpointName) -> None:
    assert CheckpointName.parse(str(name)) == name


@given(NAMES, NAMES)
def test_names_sort_by_step_then_attempt_then_generation(one: CheckpointName, other: CheckpointName) -> None:
    keys = [(n.step, n.attempt, n.generation) for n in (one, other)]
    assert (one < other) == (keys[0] < keys[1])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "step-1-a1-g1",
        "step-000000000001-a1-g1\n",
        "step-000000000001-a1-g1.tmp",
        "x-step-000000000001-a1-g1",
        "step-000000000001-a01-g1",
        "step-0000000000001-a1-g1",
        "step-00000000000١-a1-g1",
        "COMMIT.json",
    ],
)
def test_no_other_name_is_a_checkpoint(text: str) -> None:
    assert CheckpointName.parse(text) is None


@given(st.text())
def test_any_text_is_a_valid_argument(text: str) -> None:
    parsed = CheckpointName.parse(text)
    assert parsed is None or str(parsed) == text


def test_a_marker_survives_json_and_adds_up_its_files() -> None:
    files = (SavedFile(name="shard-00000.bin", bytes=10, crc32=1), SavedFile(name="shard-00000.json", bytes=5, crc32=2))
    marker = CommitMarker(job_id="j", attempt=1, generation=2, step=3, world_size=1, committed_at=4.5, files=files)
    assert CommitMarker.model_validate_json(marker.model_dump_json()) == marker
    assert marker.total_bytes == 15


@pytest.mark.parametrize(
    "text",
    [
        "NotImplementedError: Operator aten.view.default does not have a sharding strategy registered.",
        "RuntimeError: aten.view.default: in-place operations that require placement changes are not supported",
        "RuntimeError: Cannot flatten unevenly sharded tensor: dimension 0 (size 3) is not evenly divisible by mesh "
        "dimension 0 (size 2). Please redistribute the tensor before this operation.\n\n"
        "Sharding propagation failed for aten.view.default(Spec(f32[3, 8](S(0))), [24]) on DeviceMesh((shards=2))",
    ],
)
def test_an_operation_that_shards_lack_is_named_however_torch_says_it(text: str) -> None:
    [pattern] = [row.pattern for row in MISTAKES if row.name == "optimizer_on_shards"]
    match = pattern.search(text)
    assert match is not None and match[1] == "aten.view.default"
