"""What `make test` leaves to `make test-slow` and to `make test-all`: most tests of the folders in which each costs
seconds, and most cells of a test with many.

A test in a folder that is named here starts processes or a server for each of its cells (its parameters). Most
cells show what their neighbours show, and are worth their time only after a change of what they are about. Faults
mostly need one value or two together: the chosen cells have as many pairs of values as so many cells can have.
"""

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable

import pytest

FEW = {"dist": 1, "http": 2, "chaos": 1, "ray": 1}
"""Cells of a test that `make test` runs, by folder of tests/; of other folders it runs all. The marker `cells(N)` says
it for one test."""
MORE = {"dist": 2, "http": 3, "chaos": 2, "ray": 2}
"""Cells that `make test` and `make test-slow` run together. The marker's second argument says it for one test."""
LATER = (
    "tests/browser/",
    "tests/chaos/",
    "tests/dist/",
    "tests/http/cli/",
    "tests/http/clusters/",
    "tests/ray/",
    "tests/unit/deploy/",
    "tests/unit/workers/data/test_prepare",
    "tests/unit/workers/data/test_tokenising",
    "tests/unit/workers/engine/process/test_packages",
)
"""Folders and modules whose tests start ranks, jobs, pages, Helm, processes or a server each: `make test` runs those
that are marked `first`, and `make test-slow` the others."""
CORE_OF_DIST = (
    "checkpoint/test_damage",
    "checkpoint/test_layouts",
    "checkpoint/test_load_plan",
    "checkpoint/test_progress",
    "checkpoint/test_writer",
    "deterministic/",
    "group/test_every_phase",
    "group/test_re_forming",
    "group/test_rendezvous",
    "group/test_store",
    "group/test_wake_up",
    "loop/test_loops",
    "parallel/test_layouts",
    "snapshot_store/",
    "state/test_transitions",
    "step/test_buffers",
    "step/test_global_norm",
    "step/test_parity",
    "tasks/test_drawn_tasks",
)
"""Folders and modules of tests/dist that `make test` runs too: slots, checkpoint format, group store, fence, waking
and re-forming, the layouts, the step, and drawn tasks, which meet most of what the engine does."""
CORE_OF_THE_STORE = (
    "test_concurrency",
    "test_driving",
    "test_hub",
    "test_job_conditions",
    "test_reports",
    "test_schema",
)
"""Modules of tests/store that `make test` also runs on PostgreSQL; `make test-slow` does so with the others. They hold
what differs between the databases: locks, notifications, conditions in SQL, types and constraints."""


def leave_out_most(items: Iterable[tuple[str, pytest.Item]]) -> None:
    """Marks the cells that `make test` leaves out as `slow`, or as `matrix`. `items`: each with its folder."""
    cells: dict[str, list[pytest.Item]] = defaultdict(list)
    numbers: dict[str, tuple[int, int]] = {}
    for folder, item in items:
        if _is_later(folder, item):
            item.add_marker(pytest.mark.slow)
        marker = item.get_closest_marker("cells")
        few = marker.args[0] if marker is not None else FEW.get(folder)
        if few is not None and item.get_closest_marker("matrix") is None:
            test = item.nodeid.split("[")[0]
            cells[test].append(item)
            more = marker.args[1] if marker is not None and len(marker.args) > 1 else MORE.get(folder, few)
            numbers[test] = few, max(few, more)
    for test, all_cells in cells.items():
        few, more = numbers[test]
        of_one_database = _of_one_database(all_cells)
        chosen, slow = _covering(of_one_database, few), _covering(of_one_database, more)
        for item in all_cells:
            if item not in chosen:
                item.add_marker(pytest.mark.slow if item in slow else pytest.mark.matrix)


def _is_later(folder: str, item: pytest.Item) -> bool:
    if folder == "store":
        module = item.nodeid.partition(".py::")[0].rpartition("/")[2]
        return item.get_closest_marker("postgres") is not None and module not in CORE_OF_THE_STORE
    if item.nodeid.startswith(tuple(f"tests/dist/{name}" for name in CORE_OF_DIST)):
        return False
    return item.nodeid.startswith(LATER) and item.get_closest_marker("first") is None


def _of_one_database(cells: list[pytest.Item]) -> list[pytest.Item]:
    """Without the cells on PostgreSQL of a test that also has cells on SQLite: the tests of the store compare both."""
    on_sqlite = [item for item in cells if item.get_closest_marker("postgres") is None]
    return on_sqlite or cells


def _covering(cells: list[pytest.Item], most: int) -> list[pytest.Item]:
    """Return the first cell, then repeatedly the cell with the most values and pairs of values that none before has."""
    chosen, left = cells[:1], cells[1:]
    seen = _pairs(cells[0])
    while left and len(chosen) < most:
        best = max(left, key=lambda cell: len(_pairs(cell) - seen))
        left.remove(best)
        chosen.append(best)
        seen |= _pairs(best)
    return chosen


def _pairs(cell: pytest.Item) -> frozenset[tuple[str, ...]]:
    """The words of the cell's name, such as ("fsdp2",), and each two of them."""
    words = sorted(set(re.split(r"[- ]", cell.nodeid.split("[", 1)[-1].rstrip("]"))))
    return frozenset(itertools.chain(((word,) for word in words), itertools.combinations(words, 2)))
