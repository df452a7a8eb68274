"""The commit marker, the index and errors: a checkpoint exists once its marker exists, and only as a whole."""

import json
import pickle
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal_workers.checkpoint.commit import marker_in, newest_committed, read_marker, write_marker
from shoal_workers.checkpoint.errors import (
    CheckpointError,
    CommitConflict,
    DamagedCheckpoint,
    StateMismatch,
    StorageUnusable,
)
from shoal_workers.checkpoint.index import IndexItem, ShardIndex, jsonable
from shoal_workers.checkpoint.storage import open_directory
from shoal_workers.contract.marker import MARKER_NAME, CheckpointName, CommitMarker
from shoal_workers.contract.worker_reports import SavedFile


def _marker(step: int = 7) -> CommitMarker:
    files = (SavedFile(name="shard-00000.bin", bytes=5, crc32=0xDEADBEEF),)
    return CommitMarker(
        job_id="job-ü", attempt=1, generation=2, step=step, world_size=1, committed_at=1e9 / 3, files=files
    )


def _commit(root: str, step: int) -> str:
    directory = f"{root}/{CheckpointName(step, 1, 2)}"
    open_directory(directory).create()
    write_marker(directory, _marker(step))
    return directory


def test_marker_reads_back(root: str) -> None:
    assert read_marker(_commit(root, 7)) == _marker()


def test_missing_marker_is_damage(root: str) -> None:
    with pytest.raises(DamagedCheckpoint, match=r"COMMIT\.json is missing: the checkpoint was never committed"):
        read_marker(f"{root}/{CheckpointName(7, 1, 2)}")


def test_every_flipped_bit_is_detected(tmp_path: Path) -> None:
    directory = _commit(str(tmp_path), 7)
    path = Path(directory) / MARKER_NAME
    whole = path.read_bytes()
    for position in range(len(whole)):
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[position] ^= 1 << bit
            path.write_bytes(damaged)
            try:
                assert read_marker(directory) == _marker(), f"byte {position} bit {bit}"  # white space may differ
            except DamagedCheckpoint:
                pass


def test_no_truncated_marker_is_accepted(tmp_path: Path) -> None:
    directory = _commit(str(tmp_path), 7)
    path = Path(directory) / MARKER_NAME
    whole = path.read_bytes().rstrip()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(DamagedCheckpoint):
            read_marker(directory)


@pytest.mark.parametrize("content", [b"[]", b"null", b"{}", b"\xff\xfe", b"[" * 100_000, b'{"crc32": 1, "marker": 3}'])
def test_anything_else_is_not_a_marker(tmp_path: Path, content: bytes) -> None:
    directory = _commit(str(tmp_path), 7)
    (Path(directory) / MARKER_NAME).write_bytes(content)
    with pytest.raises(DamagedCheckpoint, match="is not a commit marker"):
        read_marker(directory)


def test_marker_of_another_checkpoint_is_damage(tmp_path: Path) -> None:
    directory = _commit(str(tmp_path), 7)
    other = Path(directory).rename(tmp_path / str(CheckpointName(8, 1, 2)))
    with pytest.raises(
        DamagedCheckpoint, match="belongs to step-000000000007-a1-g2, but was found in step-000000000008-a1-g2"
    ):
        read_marker(str(other))


def test_unreadable_storage_is_not_damage(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(OSError, match="Not a directory"):
        read_marker(str(tmp_path / "file" / "below"))


def test_marker_that_the_disk_cannot_give_back_is_damage(tmp_path: Path) -> None:
    path = Path(_commit(str(tmp_path), 7)) / MARKER_NAME
    path.unlink()
    path.symlink_to("/proc/self/mem")  # its first page cannot be read: EIO
    with pytest.raises(DamagedCheckpoint, match=r"cannot be read: .*Input/output error"):
        marker_in(open_directory(str(path.parent), follows_links=True))


def test_newest_committed_skips_torn_and_damaged(root: str) -> None:
    assert newest_committed(root) is None
    oldest = _commit(root, 5)
    assert newest_committed(root) == oldest
    torn = open_directory(f"{root}/{CheckpointName(9, 1, 2)}")
    torn.create()
    torn.write("shard-00000.bin", [b"half"])
    open_directory(_commit(root, 8)).write(MARKER_NAME, [b"{}"])
    newest = _commit(root, 7)
    assert newest_committed(root) == newest


def test_marker_is_json_that_people_can_read(tmp_path: Path) -> None:
    content = json.loads((Path(_commit(str(tmp_path), 7)) / MARKER_NAME).read_text())
    assert content["marker"]["step"] == 7


_UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=30)
"""Other processes may use the cores, which must not fail the test."""

_ITEM = IndexItem(
    fqn="a.b", dtype="bfloat16", shape=(4, 2), offsets=(2, 0), sizes=(2, 2), file_offset=64, nbytes=8, crc32=5
)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@_UNHURRIED
@given(st.dictionaries(st.text(), _VALUES))
def test_index_survives_storage(extra: dict[str, object]) -> None:
    index = ShardIndex(rank=1, world_size=2, generation=3, step=4, items=(_ITEM,), extra=jsonable(extra))
    assert ShardIndex.from_json(index.to_json()) == index


@pytest.mark.parametrize("extra", [{"a": object()}, {"a": b"bytes"}])
def test_what_json_lacks_is_refused(extra: dict[str, object]) -> None:
    with pytest.raises((TypeError, ValueError)):
        jsonable(extra)


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"format": 2}', b"\x80\x04pickle"])
def test_anything_else_is_not_an_index(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        ShardIndex.from_json(data)


_ERRORS = [
    DamagedCheckpoint("s3://b/step", "shard-00001.bin", "is missing"),
    StateMismatch("/ckpt", [f"it has no tensor{i}" for i in range(9)]),
    StorageUnusable("/nowhere", "PermissionError", "Use another directory."),
    CommitConflict("/ckpt"),
]


@pytest.mark.parametrize("error", _ERRORS, ids=lambda error: type(error).__name__)
def test_error_survives_pickling(error: CheckpointError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_codes_are_distinct_and_stable() -> None:
    assert [error.code for error in _ERRORS] == [
        "damaged_checkpoint",
        "state_mismatch",
        "storage_unusable",
        "commit_conflict",
    ]


def test_mismatch_shows_the_first_few_problems_and_counts_the_rest() -> None:
    assert "it has no tensor4; and 4 more" in str(_ERRORS[1])
