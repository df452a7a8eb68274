"""The rounds of islands are closed from what lies in a real directory, once, also if the storage fails meanwhile."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kit.island_rounds import announce, announcement
from shoal_service.control.islands import IslandRun, delete_rounds, find_rounds, find_runs, look_at, read_contributions
from shoal_service.core.desired import Desired
from shoal_service.core.endings import AttemptEnd
from shoal_service.fleet_views import IslandRound
from shoal_service.store import Lease, LeaseLost, Store, driving, island_rounds, submissions
from shoal_service.views import CheckpointView
from shoal_workers.checkpoint.commit import read_marker
from shoal_workers.contract.checks.spec_errors import SpecError
from shoal_workers.contract.islands import DECISION, IslandsSpec, RoundDecision, round_folder
from shoal_workers.contract.job import EndReason

Submit = Callable[..., str]


@pytest.fixture
def attempts(submit: Submit, begin: Callable[..., Any], tmp_path: Path) -> list[Any]:
    """Those of two islands that train."""
    ids: list[str] = []
    begun: list[Any] = []
    for index in (0, 1):
        islands = {"num": 2, "index": index, "grace_s": 0.0, "run": ids[0] if ids else None}
        ids.append(submit(islands=islands, checkpoint={"url": str(tmp_path)}))
        begun.append(begin(ids[-1]))
        begun[-1].report()
    return begun


@pytest.fixture
def run(attempts: list[Any]) -> str:
    """The id of the first one's job."""
    job_id: str = attempts[0].job_id
    return job_id


@pytest.fixture
def root(run: str, tmp_path: Path) -> Path:
    """The directory of the rounds; nothing has made it yet."""
    return tmp_path / run / "islands"


def _close(store: Store, lease: Lease) -> None:
    rows = store.reading(driving.to_drive)()
    for found in find_runs(rows, "/nowhere"):
        look_at(store, found, epoch=lease.epoch, now=time.time())


def _ledger(store: Store, run: str) -> list[IslandRound]:
    return [*store.reading(island_rounds.rounds)(run)]


def _decision(root: Path, number: int) -> RoundDecision:
    return RoundDecision.model_validate_json((root / round_folder(number) / DECISION).read_text())


def test_islands_of_one_run_are_found_together(store: Store, run: str, root: Path, submit: Submit) -> None:
    submit()
    alone = submit(islands={"num": 1, "index": 0})
    runs = {found.run: found for found in find_runs(store.reading(driving.to_drive)(), "/default/")}
    assert runs.keys() == {run, alone}
    assert isinstance(runs[run], IslandRun)
    assert (runs[run].root, runs[run].training) == (str(root), (0, 1))
    assert (runs[alone].root, runs[alone].training) == (f"/default/{alone}/islands", (0,))


def test_nothing_has_arrived(store: Store, lease: Lease, run: str, root: Path) -> None:
    _close(store, lease)
    assert _ledger(store, run) == [] and not root.exists()


def test_a_round_closes_when_both_islands_are_whole_and_is_written_for_them(
    store: Store, lease: Lease, run: str, root: Path
) -> None:
    announce(root, announcement(0, world_size=2, island=0))
    announce(root, announcement(0, world_size=1, island=1))
    _close(store, lease)
    [row] = _ledger(store, run)
    assert [sent.island for sent in row.arrived] == [1] and row.decision is None
    announce(root, announcement(1, world_size=2, island=0))
    _close(store, lease)
    [row] = _ledger(store, run)
    assert row.decision == _decision(root, 0)
    assert [(member.island, member.weight) for member in row.decision.members] == [(0, 0.5), (1, 0.5)]
    for member in row.decision.members:
        marker = read_marker(str(root / round_folder(0) / member.directory))
        assert (marker.job_id, marker.step) == (run, 50)


def test_the_next_round_begins_where_the_last_one_was_closed(store: Store, lease: Lease, run: str, root: Path) -> None:
    for number in range(3):
        for island in (0, 1):
            announce(root, announcement(0, world_size=1, island=island, number=number))
        _close(store, lease)
    assert [(row.round, row.decision) for row in _ledger(store, run)] == [(n, _decision(root, n)) for n in (2, 1, 0)]


def test_rounds_go_on_after_the_clock_went_back(store: Store, lease: Lease, run: str, root: Path) -> None:
    [found] = find_runs(store.reading(driving.to_drive)(), "/nowhere")
    for number in range(3):
        for island in (0, 1):
            announce(root, announcement(0, world_size=1, island=island, number=number))
        look_at(store, found, epoch=lease.epoch, now=1000.0 - 100 * number)
    assert [(row.round, row.decision is not None) for row in _ledger(store, run)] == [(2, True), (1, True), (0, True)]


def test_rounds_are_found_and_deleted_by_their_numbers(tmp_path: Path) -> None:
    for name in ("round-999999", "round-1000000", "round-2", "round-x", "other"):
        (tmp_path / name).mkdir()
    assert find_rounds(str(tmp_path)) == [999_999, 1_000_000]
    delete_rounds(str(tmp_path), 1_000_000)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "round-1000000", "round-2", "round-x"]


def test_pairs_close_each_for_itself_and_a_decision_that_was_not_written_is_written_later(
    store: Store, lease: Lease, submit: Submit, begin: Callable[..., Any], tmp_path: Path
) -> None:
    """The round of a pair may be closed while an earlier one of other islands is open."""
    run = ""
    for index in range(4):
        islands = {"num": 4, "index": index, "topology": "pairs", "run": run or None}
        job_id = submit(islands=islands, checkpoint={"url": str(tmp_path)})
        begin(job_id).report()
        run = run or job_id
    root = tmp_path / run / "islands"

    def announce_of(number: int, island: int, islands: tuple[int, ...]) -> None:
        announce(root, announcement(0, world_size=1, island=island, number=number, islands=islands))

    for number, island, pair in ((0, 0, (0, 3)), (1, 1, (1, 2)), (1, 2, (1, 2)), (2, 1, (1, 3))):
        announce_of(number, island, pair)
    (root / "round-x").mkdir()
    _close(store, lease)
    assert [(row.round, row.decision is not None) for row in _ledger(store, run)] == [
        (2, False),
        (1, True),
        (0, False),
    ]
    assert [member.island for member in _decision(root, 1).members] == [1, 2]
    announce_of(0, 3, (0, 3))
    _close(store, lease)
    decision = _decision(root, 0)
    (root / round_folder(0) / DECISION).unlink()
    _close(store, lease)
    assert _decision(root, 0) == decision and [member.island for member in decision.members] == [0, 3]


def test_what_arrives_after_its_round_was_closed_changes_nothing(
    store: Store, lease: Lease, submit: Submit, tmp_path: Path
) -> None:
    islands = {"num": 2, "grace_s": 0.0, "quorum": 1}
    run = submit(islands={**islands, "index": 0}, checkpoint={"url": str(tmp_path)})
    submit(islands={**islands, "index": 1, "run": run}, checkpoint={"url": str(tmp_path)})
    root = tmp_path / run / "islands"
    announce(root, announcement(0, world_size=1, island=0))
    _close(store, lease)
    before = _ledger(store, run)
    announce(root, announcement(0, world_size=1, island=1))
    _close(store, lease)
    assert _ledger(store, run) == before
    assert [member.island for member in _decision(root, 0).members] == [0]


def test_a_decision_that_was_stored_and_not_written_is_written_later(
    store: Store, lease: Lease, run: str, root: Path
) -> None:
    """The control plane was killed between the two writes."""
    for island in (0, 1):
        announce(root, announcement(0, world_size=1, island=island))
    _close(store, lease)
    decision = _decision(root, 0)
    (root / round_folder(0) / DECISION).unlink()
    _close(store, lease)
    assert _decision(root, 0) == decision and len(_ledger(store, run)) == 1


_CLOSER = Path(__file__).parents[1] / "kit" / "programs" / "round_closer.py"


@pytest.mark.parametrize(
    ("place", "members"),
    [("arrived", [0, 1]), ("noted", [0, 1]), ("stored", [0]), ("written", [0])],
)
def test_a_control_plane_that_is_killed_in_a_round_leaves_one_decision_to_the_next(
    store: Store, lease: Lease, store_url: str, submit: Submit, tmp_path: Path, place: str, members: list[int]
) -> None:
    """The second difference arrives after the kill. It counts if nothing was decided; else the decision stays."""
    islands = {"num": 2, "grace_s": 0.0, "quorum": 1}
    run = submit(islands={**islands, "index": 0}, checkpoint={"url": str(tmp_path)})
    submit(islands={**islands, "index": 1, "run": run}, checkpoint={"url": str(tmp_path)})
    root = tmp_path / run / "islands"
    announce(root, announcement(0, world_size=1, island=0))
    command = [sys.executable, str(_CLOSER), store_url, place]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as closer:
        assert closer.wait(60) == -signal.SIGKILL
    path = root / round_folder(0) / DECISION
    stored = [row.decision for row in _ledger(store, run) if row.decision is not None]
    written = path.read_text() if path.exists() else None
    assert (len(stored), written is not None) == {"stored": (1, False), "written": (1, True)}.get(place, (0, False))
    announce(root, announcement(0, world_size=1, island=1))
    successor = store.acquire_lease("successor", ttl_s=1e9, now=time.time() + 60)
    assert successor is not None and successor.epoch > lease.epoch + 1
    _close(store, successor)
    [row] = _ledger(store, run)
    assert row.decision is not None and [member.island for member in row.decision.members] == members
    assert not stored or row.decision == stored[0]
    assert path.read_text() == row.decision.model_dump_json() and written in (None, path.read_text())
    for island in (0, 1):
        announce(root, announcement(0, world_size=1, island=island, number=1))
    _close(store, successor)
    assert [len(row.decision.members) for row in _ledger(store, run) if row.decision] == [2, len(members)]


def test_nobody_waits_for_a_paused_island(
    store: Store, lease: Lease, attempts: list[Any], run: str, root: Path
) -> None:
    """Two are the quorum, so that no time closes the round. When the island is back, the next round waits for it."""
    announce(root, announcement(0, world_size=1, island=0))
    _close(store, lease)
    assert [row.decision for row in _ledger(store, run)] == [None]
    store.writing(submissions.request)(attempts[1].job_id, Desired.PAUSE, now=12.0)
    attempts[1].report(end=AttemptEnd(reason=EndReason.PAUSED, message="", step=1))
    _close(store, lease)
    assert [member.island for member in _decision(root, 0).members] == [0]
    store.writing(submissions.request)(attempts[1].job_id, Desired.RUN, now=20.0)
    announce(root, announcement(0, world_size=1, island=0, number=1))
    _close(store, lease)
    assert [row.decision is None for row in _ledger(store, run)] == [True, False]


def test_a_storage_that_fails_leaves_the_round_open_and_other_runs_go_on(
    store: Store, lease: Lease, run: str, root: Path, submit: Submit, tmp_path: Path
) -> None:
    root.parent.mkdir(parents=True)
    root.write_text("where the directory of the rounds would be")
    other = submit(islands={"num": 1, "index": 0}, checkpoint={"url": str(tmp_path)})
    announce(tmp_path / other / "islands", announcement(0, world_size=1, island=0))
    with pytest.raises(OSError, match="directory"):
        read_contributions(str(root), 0, run, now=time.time())
    _close(store, lease)
    assert _ledger(store, run) == []
    assert [row.decision is not None for row in _ledger(store, other)] == [True]
    root.unlink()
    for island in (0, 1):
        announce(root, announcement(0, world_size=1, island=island))
    _close(store, lease)
    assert _ledger(store, run)[0].decision == _decision(root, 0)


def test_a_control_plane_that_has_lost_its_lease_closes_nothing(
    store: Store, lease: Lease, run: str, root: Path
) -> None:
    for island in (0, 1):
        announce(root, announcement(0, world_size=1, island=island))
    runs = find_runs(store.reading(driving.to_drive)(), "/nowhere")
    with pytest.raises(LeaseLost):
        look_at(store, runs[0], epoch=lease.epoch + 1, now=time.time())
    assert _ledger(store, run) == [] and not (root / round_folder(0) / DECISION).exists()


def test_what_a_jobs_code_has_written_there_closes_no_round_and_stops_none(
    store: Store, lease: Lease, run: str, root: Path
) -> None:
    """No document at all, and an announcement of another island than that of its directory."""
    announce(root, announcement(0, world_size=1, island=1))
    [other] = (root / round_folder(0) / "island-1").iterdir()
    false = root / round_folder(0) / "island-0" / other.name
    false.mkdir(parents=True)
    (false / "announced-0.json").write_text("{")
    _close(store, lease)
    assert [arrival.island for arrival in _ledger(store, run)[0].arrived] == [1]
    (false / "announced-0.json").write_text((other / "announced-0.json").read_text())
    _close(store, lease)
    assert [arrival.island for arrival in _ledger(store, run)[0].arrived] == [1]


def test_a_damaged_marker_and_a_deleted_run_are_left_for_the_next_time(
    store: Store, lease: Lease, run: str, root: Path
) -> None:
    announce(root, announcement(0, world_size=1))
    [directory] = (root / round_folder(0) / "island-0").iterdir()
    (directory / "COMMIT.json").write_text("{")
    _close(store, lease)
    assert _ledger(store, run) == []
    found = IslandRun("job-000000000000", IslandsSpec(num=1, index=0), str(root), (0,))
    look_at(store, found, epoch=lease.epoch, now=time.time())


def test_rounds_that_no_island_can_need_again_are_deleted(
    store: Store, lease: Lease, attempts: list[Any], root: Path, submit: Any
) -> None:
    """The oldest checkpoint of each island is of a later step than what it sent to the next round. An island that joins
    would need them, so none can any more."""

    def close(number: int) -> list[str]:
        for island in (0, 1):
            announced = announcement(0, world_size=1, island=island, number=number, step=50 * (number + 1))
            announce(root, announced)
        _close(store, lease)
        return sorted(path.name for path in root.iterdir())

    def save(attempt: Any, *steps: int) -> None:
        saved = {"url": "/data/x", "state": "committed", "attempt": 1, "generation": 1}
        attempt.report(checkpoints=tuple(CheckpointView(step=step, **saved) for step in steps))

    assert close(0) == [round_folder(0)]
    save(attempts[0], 120, 160)
    assert close(1) == [round_folder(0), round_folder(1)]
    save(attempts[1], 110)
    assert close(2) == [round_folder(1), round_folder(2)]
    run = attempts[0].job_id
    attempts[1].report(end=AttemptEnd(reason=EndReason.FINISHED, message="", step=150))
    with pytest.raises(SpecError, match=f"islands.run {run}: .* those before round 1 are deleted"):
        submit(islands={"num": 2, "index": 1, "run": run})
