"""Closes the rounds of islands: reads what their workers have announced in the storage, stores the decision, writes it.

    storage     <checkpoint.url>/<job of island 0>/islands/round-000007/island-2/<checkpoint>/announced-0.json, ...
    ledger      the rows of `island_rounds`: which islands a round has, with which samples, and what was late
    storage     .../round-000007/decision.json, which every island reads

The ledger is written first, so a control plane that is restarted between the two writes the same decision again. If the
storage does not answer, or no control plane runs, rounds stay open, and the islands train on. Called by the control
loop, a background call for each run.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pydantic import ValidationError

from shoal_service.core.islands import Contribution, close_round, merge_announcements
from shoal_service.store import JobNotFound, Store, island_rounds
from shoal_service.store.driving import DriveRow
from shoal_service.supervisor.config import checkpoint_root
from shoal_workers.checkpoint.commit import commit_in, marker_of
from shoal_workers.checkpoint.errors import CommitConflict, DamagedCheckpoint
from shoal_workers.checkpoint.storage import Directory, join, open_directory
from shoal_workers.contract.islands import (
    DECISION,
    FOLDER,
    Announcement,
    IslandsSpec,
    RoundDecision,
    announcement_file,
    round_folder,
)
from shoal_workers.contract.marker import CheckpointName

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class IslandRun:
    """Islands that train one model together, and of which one or more have not ended."""

    run: str
    """The id of the job of island 0."""
    spec: IslandsSpec
    root: str
    """URL of the directory of the rounds."""
    training: tuple[int, ...]
    """The islands whose jobs have not ended."""


def find_runs(rows: Iterable[DriveRow], default_url: str) -> list[IslandRun]:
    """Return the runs of these jobs. `default_url`: for specs without a `checkpoint.url`."""
    by_run: dict[str, list[DriveRow]] = defaultdict(list)
    for row in rows:
        if row.spec.islands is not None and row.spec.islands.run is not None:
            by_run[row.spec.islands.run].append(row)
    runs = []
    for run, jobs in sorted(by_run.items()):
        spec = jobs[0].spec.islands
        assert spec is not None
        root = join(checkpoint_root(jobs[0].spec, default_url, run), FOLDER)
        indices = sorted(job.spec.islands.index or 0 for job in jobs if job.spec.islands is not None)
        runs.append(IslandRun(run, spec, root, tuple(indices)))
    return runs


def look_at(store: Store, run: IslandRun, *, epoch: int, now: float) -> None:
    """Close the open round of a run if that is due. If its storage fails, that is left for the next time.

    Raises LeaseLost.
    """
    newest = store.reading(island_rounds.newest_decision)(run.run, run.spec.topology)
    numbers = [0 if newest is None else newest.round + 1]
    try:
        if newest is not None:
            write_decision(run.root, newest)
        if run.spec.topology == "pairs":
            numbers = find_rounds(run.root)
            closed = store.reading(island_rounds.closed)(run.run, since=min(numbers, default=0))
            numbers = [number for number in numbers if number not in closed]
        for number in numbers:
            _look_at_round(store, run, number, epoch=epoch, now=now)
    except JobNotFound:
        _log.info("islands.run_deleted", extra={"run": run.run})
    except (OSError, CommitConflict, DamagedCheckpoint) as error:
        _log.warning("islands.storage_failed", extra={"run": run.run, "error": str(error)})


def _look_at_round(store: Store, run: IslandRun, number: int, *, epoch: int, now: float) -> None:
    contributions = read_contributions(run.root, number, run.run, now=now)
    if not contributions:
        return
    with store.write(epoch) as tx:
        arrived = island_rounds.note(tx, run.run, number, contributions, now=now)
        decision = close_round(number, run.spec, arrived, run.training, now)
        if decision is not None:
            island_rounds.close(tx, run.run, decision, now=now)
    if decision is not None:
        write_decision(run.root, decision)
        delete_rounds(run.root, store.reading(island_rounds.first_needed)(run.run, run.spec))


def find_rounds(root: str) -> list[int]:
    """Return the rounds to which an island has written something. Raises OSError."""
    numbers = ((name, name.removeprefix("round-")) for name in _list_directories(open_directory(root)))
    return sorted(int(text) for name, text in numbers if text.isdecimal() and name == round_folder(int(text)))


def read_contributions(root: str, number: int, run: str, *, now: float) -> list[Contribution]:
    """Return what is whole of a round in the storage, and mark it as such; of each island the first. Raises OSError."""
    place = open_directory(join(root, round_folder(number)))
    contributions = []
    for island in _list_directories(place):
        for name in _list_directories(place.child(island)):
            checkpoint, directory = CheckpointName.parse(name), place.child(island).child(name)
            if checkpoint is None:
                continue
            announced = list(_read_announcements(directory))
            contribution = merge_announcements(f"{island}/{name}", announced)
            if contribution is not None and island == f"island-{contribution.island}":
                parts = [announcement.part for announcement in announced]
                commit_in(directory, marker_of(parts, job_id=run, attempt=checkpoint.attempt, now=now))
                contributions.append(contribution)
                break
    return contributions


def write_decision(root: str, decision: RoundDecision) -> None:
    """Write a decision unless it is there. Raises OSError."""
    place = open_directory(join(root, round_folder(decision.round)))
    if DECISION in place.files():
        return
    place.create_file(DECISION, decision.model_dump_json().encode())


def delete_rounds(root: str, first_needed: int) -> None:
    """Delete the rounds before one. Raises OSError."""
    for number in find_rounds(root):
        if number < first_needed:
            open_directory(root).child(round_folder(number)).remove_tree()


def _read_announcements(directory: Directory) -> Iterable[Announcement]:
    names: Mapping[str, int] = directory.files()
    for rank in range(len(names)):
        if announcement_file(rank) not in names:
            return
        try:
            yield Announcement.model_validate_json(directory.read(announcement_file(rank)))
        except ValidationError as error:  # code of the job can write there
            _log.warning("islands.announcement_invalid", extra={"directory": directory.url, "error": str(error)})
            return


def _list_directories(place: Directory) -> list[str]:
    try:
        return sorted(place.directories())
    except FileNotFoundError:
        return []
