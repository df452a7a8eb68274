"""An attempt that was given up, and still trains and writes: every order of its accesses and those of the next one."""

from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path

import pytest

from shoal_workers.checkpoint import beginnings
from shoal_workers.checkpoint.commit import checkpoint_names
from shoal_workers.checkpoint.storage import Directory, open_job_directory
from shoal_workers.contract.marker import MARKER_NAME, CheckpointName

Step = Callable[[], None]


@pytest.fixture
def place(tmp_path: Path) -> Directory:
    return open_job_directory(str(tmp_path / "job"))


def put(place: Directory, name: CheckpointName) -> None:
    there = place.child(str(name))
    there.create()
    there.write(MARKER_NAME, [b"{}"])


class Old:
    """Attempt 1: commits step 20 as its second one, then deletes all but the newest. Each step is one access."""

    def __init__(self, place: Directory) -> None:
        self._place = place
        self._may = False

    def steps(self) -> list[Step]:
        return [self._look, self._commit, self._look, self._delete]

    def _look(self) -> None:
        self._may = beginnings.later_attempt(self._place, 1) is None

    def _commit(self) -> None:
        if self._may:
            put(self._place, CheckpointName(20, 1, 1))
        self._may = False

    def _delete(self) -> None:
        if self._may:
            for name in checkpoint_names(self._place)[1:]:
                self._place.child(str(name)).remove(MARKER_NAME)


class New:
    """Attempt 2: begins, and restores the newest that counts."""

    def __init__(self, place: Directory) -> None:
        self._place = place
        self._begun: Iterator[None] = iter(())
        self.restored: CheckpointName | None = None

    def steps(self) -> list[Step]:
        self._begun = self._begin()
        return [lambda: next(self._begun), lambda: next(self._begun, None), self._restore]

    def _begin(self) -> Iterator[None]:
        """Stops between the note that it has begun and its list."""
        paused: list[CheckpointName] = []
        self._place.create()
        self._place.write("began-a2.json", [b'{"attempt": 2, "found": null}'])
        yield
        paused = checkpoint_names(self._place)
        beginnings.begin(self._place, 2, paused)

    def _restore(self) -> None:
        newest = beginnings.newest_beginning(self._place)
        counting = [name for name in checkpoint_names(self._place) if newest.counts(name)]
        self.restored = counting[0]


@pytest.mark.parametrize("turns", list(combinations(range(7), 3)), ids=lambda turns: "".join(map(str, turns)))
def test_in_every_order_the_next_attempt_restores_what_is_there_and_later_commits_never_count(
    place: Directory, turns: tuple[int, ...]
) -> None:
    put(place, CheckpointName(10, 1, 1))
    old, new = Old(place), New(place)
    of_old, of_new = iter(old.steps()), iter(new.steps())
    for turn in range(7):
        next(of_new if turn in turns else of_old)()
    assert new.restored is not None
    assert MARKER_NAME in place.child(str(new.restored)).files(), "what it restores was not deleted"
    newest = beginnings.newest_beginning(place)
    counting = [name for name in checkpoint_names(place) if newest.counts(name)]
    assert max(counting) == new.restored, "a later search finds the same one"


def test_an_attempt_that_died_before_it_listed_hides_nothing(place: Directory) -> None:
    put(place, CheckpointName(10, 1, 1))
    beginnings.begin(place, 1, [])
    place.write("began-a2.json", [b'{"attempt": 2, "found": null}'])
    assert beginnings.newest_beginning(place).attempt == 1
    beginnings.begin(place, 3, checkpoint_names(place))
    assert beginnings.newest_beginning(place).counts(CheckpointName(10, 1, 1))
    assert [name for name in place.files() if name.startswith("began")] == ["began-a3.json"], "older ones are removed"


def test_what_did_not_count_for_an_attempt_counts_for_no_later_one(place: Directory) -> None:
    put(place, CheckpointName(10, 1, 1))
    beginnings.begin(place, 2, checkpoint_names(place))
    put(place, CheckpointName(30, 1, 1))  # a race that the look before the commit has lost
    beginnings.begin(place, 3, checkpoint_names(place))
    newest = beginnings.newest_beginning(place)
    assert newest.found == {str(CheckpointName(10, 1, 1))}


def test_storage_of_a_release_without_beginnings_counts_as_a_whole(place: Directory) -> None:
    assert beginnings.newest_beginning(place) == beginnings.Beginning()
    assert beginnings.Beginning().counts(CheckpointName(10, 1, 1))
    place.create()
    place.write("began-a7.json", [b"torn"])
    assert beginnings.newest_beginning(place).attempt == 0, "a file that cannot be read hides nothing"
    beginnings.forget_beginnings(place)
    assert dict(place.files()) == {}
