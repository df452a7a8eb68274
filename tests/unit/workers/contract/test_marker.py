"""Names of checkpoint directories sort by step and are read back only as they are written."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_workers.contract.marker import CheckpointName, CommitMarker
from shoal_workers.contract.worker_reports import SavedFile

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
