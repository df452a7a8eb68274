"""New workers of an attempt are sent to the nodes that have room for them now."""

from collections.abc import Sequence

import pytest

from shoal_service.cluster.errors import GcsUnavailable
from shoal_service.core.attempt.messages import StartWorker
from shoal_service.supervisor.workers.ray_fleet import FreeNode, NodePreference
from shoal_workers.contract.placing import CapacityKind, Placement, label_selector

A, B = FreeNode("a", {"zone": "east"}, {"CPU": 2.0}), FreeNode("b", {"zone": "west"}, {"CPU": 4.0, "memory": 8.0})


class World:
    """A head's tables that a test changes, and a clock."""

    def __init__(self, *nodes: FreeNode, needs: dict[str, float] | None = None) -> None:
        self.nodes: Sequence[FreeNode] = nodes
        self.now_mono = 0.0
        self.num_reads = 0
        self.is_away = False
        self.preference = NodePreference(
            needs or {"CPU": 1.0, "GPU": 0}, Placement.PACK, read=self.read, monotonic=lambda: self.now_mono
        )
        self.index = -1

    def read(self) -> Sequence[FreeNode]:
        self.num_reads += 1
        if self.is_away:
            raise GcsUnavailable("the head is away")
        return self.nodes

    def start(self, num: int = 1, *, avoid: tuple[str, ...] = (), labels: dict[str, str] | None = None) -> str:
        found = ""
        for missing in range(num, 0, -1):
            self.index += 1
            order = StartWorker(self.index, f"w{self.index}", avoid, num_missing=missing)
            found += self.preference.choose(order, labels or {}) or "-"
        return found


def test_what_was_chosen_is_taken_until_the_table_is_read_again() -> None:
    world = World(A, B)
    assert world.start(7) == "bbbbaa-" and world.num_reads == 1
    world.now_mono = 1.5
    assert world.start(1) == "a" and world.num_reads == 2, "the head shows room there again"


def test_growth_goes_to_the_nodes_of_the_job() -> None:
    world = World(A, B)
    world.preference.is_on(100, "a")
    assert world.start(2) == "aa"
    for index in (100, 0, 1):
        world.preference.forget(index)
    world.now_mono = 2.0
    assert world.start(3) == "bbb"


def test_a_worker_counts_where_it_runs_and_not_where_it_was_sent() -> None:
    world = World(A, B)
    assert world.start(2) == "aa"
    for index in (0, 1):
        world.preference.is_on(index, "b")
    world.now_mono = 2.0
    assert world.start(1) == "b"


@pytest.mark.parametrize(
    ("avoid", "labels", "expected"),
    [
        (("b",), {}, "a"),
        (("a", "b"), {}, "-"),
        ((), {"zone": "west"}, "b"),
        ((), {"zone": "north"}, "-"),
        ((), {"zone": "!in(east,north)"}, "b"),
        ((), label_selector({}, CapacityKind.ON_DEMAND), "a"),
        ((), label_selector({}, CapacityKind.SPOT), "-"),
    ],
)
def test_only_nodes_on_which_the_worker_may_be(avoid: tuple[str, ...], labels: dict[str, str], expected: str) -> None:
    assert World(A, B).start(avoid=avoid, labels=labels) == expected


def test_every_resource_counts() -> None:
    assert World(A, B, needs={"CPU": 1.0, "memory": 4.0}).start(3) == "bb-"


def test_ray_chooses_for_workers_that_reserve_nothing_and_while_the_head_is_away() -> None:
    idle = World(A, B, needs={"CPU": 0.0})
    assert idle.start(2) == "--" and idle.num_reads == 0
    away = World(A, B)
    away.is_away = True
    assert away.start(2) == "--" and away.num_reads == 1
    away.is_away, away.now_mono = False, 2.0
    assert away.start(2) == "aa"
