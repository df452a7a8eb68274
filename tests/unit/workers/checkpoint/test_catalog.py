"""The catalog of a job's checkpoints: commit, find, verify, retire, and the note of the spec."""

import errno
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal_service.core.attempt.messages import CheckpointFound, FindCheckpoint, StorageAway
from shoal_service.supervisor.checkpoints import CheckpointCatalog, CheckpointCoordinator, _is_final
from shoal_workers.checkpoint.errors import DamagedCheckpoint, StorageUnusable
from shoal_workers.checkpoint.spec_note import NAME, SpecChanged, differences, note_spec
from shoal_workers.checkpoint.storage import open_directory
from shoal_workers.contract.marker import MARKER_NAME, CheckpointName
from shoal_workers.contract.spec import JobSpec
from shoal_workers.contract.worker_reports import SavedPart

WriteParts = Callable[..., list[SavedPart]]


@pytest.fixture
def catalog(root: str) -> CheckpointCatalog:
    return CheckpointCatalog(root)


@pytest.fixture
def commit(catalog: CheckpointCatalog, write_parts: WriteParts) -> Callable[..., CheckpointName]:
    def write_and_commit(step: int, attempt: int = 1, generation: int = 1) -> CheckpointName:
        parts = write_parts(step, attempt, generation)
        catalog.commit(parts, job_id="job", attempt=attempt, now=float(step))
        return CheckpointName(step, attempt, generation)

    return write_and_commit


Commit = Callable[..., CheckpointName]


def test_empty_root_has_no_checkpoint(catalog: CheckpointCatalog) -> None:
    assert catalog.search().name is None
    assert catalog.markers() == []
    assert catalog.retain(1, damaged=(), in_flight=()) == []


def _lose_directory(root: Path, newest: Path) -> None:
    root.rename(root.with_name("mounted"))


def _lose_everything(root: Path, newest: Path) -> None:
    _lose_directory(root, newest)
    root.mkdir()


def _lose_newest(root: Path, newest: Path) -> None:
    shutil.copytree(root, root.with_name("mounted"))
    shutil.rmtree(newest)


def _lose_marker(root: Path, newest: Path) -> None:
    shutil.copytree(root, root.with_name("mounted"))
    (newest / MARKER_NAME).unlink()


@pytest.mark.parametrize("root", ["path"], indirect=True)
@pytest.mark.parametrize("lose", [_lose_directory, _lose_everything, _lose_newest, _lose_marker])
async def test_a_storage_that_is_not_the_jobs_is_left_as_it_is_until_it_is(
    tmp_path: Path, catalog: CheckpointCatalog, commit: Commit, lose: Callable[[Path, Path], None]
) -> None:
    _, newest, root = commit(10), str(commit(20)), tmp_path / "job"
    events: list[Any] = []
    world = SimpleNamespace(catalog=catalog, journal=SimpleNamespace(require_current=None), clock=None)
    coordinator = CheckpointCoordinator(SimpleNamespace(attempt=2), world, None, events.append)  # type: ignore[arg-type]
    lose(root, root / newest)
    before = sorted(root.rglob("*"))
    for _ in range(2):
        await coordinator.find(FindCheckpoint(expected=newest))
        away = events.pop()
        assert isinstance(away, StorageAway) and away.is_missing and newest in away.message
    assert sorted(root.rglob("*")) == before
    shutil.rmtree(root, ignore_errors=True)
    root.with_name("mounted").rename(root)  # the mount appears in the middle of the wait
    await coordinator.find(FindCheckpoint(expected=newest))
    assert events == [CheckpointFound(newest)] and (root / "began-a2.json").exists()


def test_parts_may_arrive_in_any_order(catalog: CheckpointCatalog, write_parts: WriteParts) -> None:
    parts = write_parts(10)
    assert catalog.commit(parts[::-1], job_id="job", attempt=1, now=5.0) == catalog.commit(
        parts, job_id="job", attempt=1, now=5.0
    )


@pytest.mark.parametrize("spoil", ["missing rank", "other step", "other directory", "same rank twice"])
def test_incomplete_parts_are_a_programming_error(
    catalog: CheckpointCatalog, write_parts: WriteParts, spoil: str
) -> None:
    parts = write_parts(10)
    spoilt = {
        "missing rank": parts[:1],
        "other step": [parts[0], parts[1].model_copy(update={"step": 11})],
        "other directory": [parts[0], parts[1].model_copy(update={"directory": "/elsewhere/step-1"})],
        "same rank twice": [parts[0], parts[0]],
    }[spoil]
    with pytest.raises(AssertionError):
        catalog.commit(spoilt, job_id="job", attempt=1, now=5.0)
    assert catalog.search().name is None


def test_part_that_the_committer_cannot_see_is_not_committed(
    catalog: CheckpointCatalog, write_parts: WriteParts, root: str
) -> None:
    parts = write_parts(10)
    open_directory(root).child(str(CheckpointName(10, 1, 1))).remove("shard-00001.bin")
    with pytest.raises(DamagedCheckpoint, match=r"shard-00001\.bin is missing \(2000 bytes\)"):
        catalog.commit(parts, job_id="job", attempt=1, now=5.0)
    assert catalog.search().name is None


def test_newest_is_by_step_then_by_writer(catalog: CheckpointCatalog, commit: Commit) -> None:
    commit(10, generation=1)
    commit(20, generation=1)
    newest = commit(20, generation=2)
    assert catalog.search().name == newest
    assert catalog.search(excluding=[newest]).name == CheckpointName(20, 1, 1)
    both = [newest, CheckpointName(20, 1, 1)]
    assert catalog.search(excluding=both).name == CheckpointName(10, 1, 1)
    assert catalog.search(excluding=[*both, CheckpointName(10, 1, 1)]).name is None


@pytest.mark.parametrize("file", ["shard-00000.bin", "shard-00001.bin", "shard-00001.json"])
def test_verify_finds_a_flipped_byte(catalog: CheckpointCatalog, commit: Commit, root: str, file: str) -> None:
    name = commit(10)
    place = open_directory(root).child(str(name))
    content = bytearray(place.read(file))
    content[len(content) // 2] ^= 1
    place.write(file, [bytes(content)])
    with pytest.raises(DamagedCheckpoint, match=rf"{file} has crc32 0x[0-9a-f]+, the marker says 0x[0-9a-f]+"):
        catalog.verify(name)


def test_verify_finds_a_short_and_a_long_file(catalog: CheckpointCatalog, commit: Commit, root: str) -> None:
    name = commit(10)
    place = open_directory(root).child(str(name))
    content = place.read("shard-00000.bin")
    for spoilt in (content[:-1], content + b"x"):
        place.write("shard-00000.bin", [spoilt])
        with pytest.raises(DamagedCheckpoint, match=rf"is {len(spoilt)} bytes long, the marker says {len(content)}"):
            catalog.verify(name)


def test_verify_ignores_extra_files(catalog: CheckpointCatalog, commit: Commit, root: str) -> None:
    name = commit(10)
    open_directory(root).child(str(name)).write("shard-00009.bin", [b"of nobody"])
    catalog.verify(name)


def test_retain_deletes_the_oldest_and_the_torn(
    catalog: CheckpointCatalog, commit: Commit, write_parts: WriteParts, root: str
) -> None:
    write_parts(5)
    names = [commit(step) for step in (10, 20, 30)]
    write_parts(40)
    assert catalog.retain(2, damaged=(), in_flight=()) == [CheckpointName(5, 1, 1), names[0]]
    assert sorted(open_directory(root).directories()) == [str(CheckpointName(step, 1, 1)) for step in (20, 30, 40)]
    catalog.verify(names[1])


def test_retain_leaves_damaged_good_and_in_flight_ones(
    catalog: CheckpointCatalog, commit: Commit, write_parts: WriteParts
) -> None:
    write_parts(5)
    first, second, third = commit(10), commit(20), commit(30)
    assert catalog.retain(1, damaged=[third, second], in_flight=[CheckpointName(5, 1, 1)]) == []
    assert catalog.search(excluding=[third, second]).name == first


def test_a_half_deleted_checkpoint_does_not_count_and_is_deleted_next_time(
    catalog: CheckpointCatalog, commit: Commit, root: str
) -> None:
    first, second = commit(10), commit(20)
    open_directory(root).child(str(first)).remove(MARKER_NAME)
    assert catalog.search(excluding=[second]).name is None
    assert catalog.retain(5, damaged=(), in_flight=()) == [first]


def test_other_directories_are_left_alone(catalog: CheckpointCatalog, commit: Commit, root: str) -> None:
    for name in ("notes", "step-1", "step-000000000001-a1-g1.bak"):
        place = open_directory(root).child(name)
        place.create()
        place.write("x", [b"x"])
    commit(10)
    commit(20)
    catalog.retain(1, damaged=(), in_flight=())
    assert {"notes", "step-1", "step-000000000001-a1-g1.bak"} <= set(open_directory(root).directories())


def test_writable_root_passes_and_stays_clean(catalog: CheckpointCatalog, root: str) -> None:
    catalog.check_writable()
    assert dict(open_directory(root).files()) == {}


def test_a_search_names_damaged_markers_and_passes_over_directories_without_one(
    catalog: CheckpointCatalog, root: str, write_parts: WriteParts
) -> None:
    for step in (4, 8, 12):
        catalog.commit(write_parts(step), job_id="j1", attempt=1, now=1.0)
    write_parts(16)
    open_directory(catalog.url(CheckpointName(12, 1, 1))).write(MARKER_NAME, [b"{"])
    found = catalog.search()
    assert found.name == CheckpointName(8, 1, 1)
    [(name, error)] = found.damaged
    assert name == CheckpointName(12, 1, 1) and "COMMIT.json" in str(error)
    assert catalog.search(excluding=[name]).damaged == ()


@pytest.mark.parametrize(
    ("error", "is_final"),
    [
        (PermissionError("denied"), True),
        (FileNotFoundError("no such bucket"), True),
        (OSError(errno.EROFS, "read-only"), True),
        (OSError(errno.EIO, "input/output error"), False),
        (OSError(errno.ESTALE, "stale file handle"), False),
        (TimeoutError("no answer"), False),
        (ConnectionRefusedError("refused"), False),
    ],
    ids=repr,
)
def test_what_may_pass_is_not_final(error: OSError, is_final: bool) -> None:
    assert _is_final(error) is is_final


def test_an_unwritable_root_is_refused_with_reason_and_hint(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageUnusable) as caught:
        CheckpointCatalog(f"{tmp_path}/file/job").check_writable()
    assert f"'{tmp_path}/file/job'" in str(caught.value)
    assert "NotADirectoryError" in caught.value.reason or "FileExistsError" in caught.value.reason
    assert "every node reaches under the same path" in caught.value.way_out and caught.value.is_final


def test_read_only_root_is_unusable() -> None:
    with pytest.raises(StorageUnusable, match="/proc/self/checkpoints"):  # not even root may write there
        CheckpointCatalog("/proc/self/checkpoints").check_writable()


def test_unknown_protocol_is_unusable() -> None:
    with pytest.raises(StorageUnusable, match="nosuch") as caught:
        CheckpointCatalog("nosuch://bucket/job").check_writable()
    assert caught.value.is_final


def test_storage_that_does_not_answer_is_not_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match="Not a directory"):
        CheckpointCatalog(f"{tmp_path}/file/job").search()


def test_the_catalog_needs_no_torch() -> None:
    program = "import sys, shoal_service.supervisor.checkpoints; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_verification_tells_how_far_it_is(catalog: CheckpointCatalog, commit: Commit) -> None:
    name = commit(10)
    seen: list[tuple[int, int]] = []
    catalog.verify(name, lambda read, of: seen.append((read, of)))
    [(_, marker)] = catalog.markers()
    assert seen[0] == (0, marker.total_bytes) and seen[-1] == (marker.total_bytes, marker.total_bytes)
    assert seen == sorted(seen) and len(seen) > len(marker.files)


def test_a_deleted_checkpoint_is_gone_and_the_others_stay(catalog: CheckpointCatalog, commit: Commit) -> None:
    first, second = commit(10), commit(20)
    assert catalog.has_marker(first)
    catalog.delete(first)
    catalog.delete(first)
    assert not catalog.has_marker(first)
    assert [name for name, _ in catalog.markers()] == [second]


def spec(**changes: Any) -> JobSpec:
    return JobSpec.model_validate({"stop": {"steps": 4}, "task": "mine:Task", "model": {"width": 8}, **changes})


def test_the_same_computation_may_continue(tmp_path: Path) -> None:
    note_spec(str(tmp_path / "new"), spec(), may_differ=False)
    same = spec(name="other", elasticity={"max_workers": 2}, checkpoint={"keep": 7})
    note_spec(str(tmp_path / "new"), same, may_differ=False)


def test_another_spec_is_refused_with_its_keys_until_it_is_allowed(tmp_path: Path) -> None:
    root = str(tmp_path)
    note_spec(root, spec(), may_differ=False)
    changed = spec(model={"depth": 3}, optimizer={"lr": 0.5}, seed=7)
    for _ in range(2):  # a refused spec is not noted
        with pytest.raises(SpecChanged) as refused:
            note_spec(root, changed, may_differ=False)
        assert refused.value.keys == ("model.depth", "model.width", "optimizer.lr", "seed")
    note_spec(root, changed, may_differ=True)
    note_spec(root, changed, may_differ=False)


@pytest.mark.parametrize("text", ["", "{", "[1]", "\xff"])
def test_a_note_that_cannot_be_read_is_replaced(tmp_path: Path, text: str) -> None:
    (tmp_path / NAME).write_bytes(text.encode("latin-1"))
    note_spec(str(tmp_path), spec(), may_differ=False)
    with pytest.raises(SpecChanged):
        note_spec(str(tmp_path), spec(seed=1), may_differ=False)


def test_a_key_that_a_later_release_adds_does_not_differ() -> None:
    document = spec().model_dump(mode="json")
    old = {key: value for key, value in document.items() if key != "deterministic"}
    assert differences(old, document | {"deterministic": True}) == ()
