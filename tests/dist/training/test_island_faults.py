"""Islands under faults, with real groups: one is cut off, moved, paused or slow, and the control plane is killed.
Losses are those of a plain loop that follows the same ledger."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from kit.databases import MigratedDatabases
from kit.processes.fleet import PATIENCE_S, Job
from kit.processes.played_rounds import PlayedRounds
from kit.processes.server import until
from kit.processes.storage_faults import hanging
from kit.processes.warm import warm_python
from kit.worlds import plain_islands
from kit.worlds.trained_islands import landings, last_weights, squares
from shoal_service.control.islands import read_contributions
from shoal_service.core.islands import Contribution
from shoal_service.store import Store, island_rounds, submissions
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.islands import DECISION, FOLDER, IslandsSpec, RoundDecision, round_folder
from shoal_workers.contract.layout import Layout, fully_sharded
from shoal_workers.contract.marker import CheckpointName
from shoal_workers.contract.messages import ExitKind

GRACE_S = 100.0
"""Where an island waits for it in vain, the test takes too long."""
CLOSER = Path(__file__).parents[2] / "kit" / "programs" / "round_closer.py"


def make_specs(steps: int, pace_s: Mapping[int, float], **islands: Any) -> list[dict[str, Any]]:
    """Specs of two islands. `pace_s`: what each micro-batch takes more, by island; there are two in a step."""
    section = {"num": 2, "every_steps": 4, "grace_s": GRACE_S, "run": "island-0", **islands}
    return [
        {
            "task": "tiny_tasks:Paced",
            "model": {"pace_s": pace_s.get(index, 0.0)},
            "batch": {"global_size": 8, "micro_size": 4},
            "optimizer": {"lr": 0.02},
            "schedule": {"warmup_steps": 2},
            "stop": {"steps": steps},
            "validation": {"samples": 0},
            "elasticity": {"max_workers": 2},
            "seed": 3,
            "islands": {**section, "index": index},
        }
        for index in (0, 1)
    ]


class Isles:
    """Islands in one storage, the workers that each has had, and what all of them have trained."""

    def __init__(self, storage: str, jobs: Sequence[Job]) -> None:
        """`storage`: URL above the directories of the jobs, as the control plane reaches it."""
        self.storage, self.jobs = storage, jobs
        self.groups: list[list[Any]] = [[] for _ in jobs]
        self.section = IslandsSpec.model_validate(jobs[0].spec["islands"])

    def play(self, **changes: Any) -> closing[PlayedRounds]:
        return closing(PlayedRounds(self.storage, self.section.model_copy(update=changes)))

    def start(self, index: int, *holds: int, layout: Layout | None = None, node_id: str = "n1", **changes: Any) -> Any:
        """Begin with new workers, from the newest checkpoint; return the first one. `holds`: steps after which it is
        held before the next one."""
        layout = layout or fully_sharded(1)
        workers = self.jobs[index].workers(layout.world_size, node_id)
        for step in holds:
            workers[0].strike("forward", step, "hold")
        self.groups[index].extend(workers)
        self.jobs[index].start(workers, layout=layout, **changes)
        return workers[0]

    def leave(self, index: int, num_workers: int = 1) -> int:
        """The newest workers, of which the first is held, end with this step, and write a checkpoint. Return the steps
        that are in it."""
        job, workers = self.jobs[index], self.groups[index][-num_workers:]
        for worker in workers:
            worker.call("request_yield", job.generation)
        workers[0].call("go")
        ends = [worker.exit() for worker in workers]
        assert {end.kind for end in ends} == {ExitKind.YIELDED}, [end.error for end in ends]
        job.commit(workers)
        for worker in workers:
            worker.poll()
            worker.kill()
            assert worker.died()
        return int(ends[0].step)

    def end(self, index: int, num_workers: int = 1) -> None:
        workers = self.groups[index][-num_workers:]
        ends = [worker.exit() for worker in workers]
        assert {end.kind for end in ends} == {ExitKind.FINISHED}, [end.error for end in ends]
        self.jobs[index].commit(workers)

    def end_both(self, rounds: PlayedRounds) -> None:
        """Nobody waits for the one that has ended first."""
        self.end(0)
        rounds.training = {1}
        self.end(1)

    def arrived(self, number: int) -> set[int]:
        """The islands whose differences of a round are whole in the storage."""
        run = self.section.run
        contributions = read_contributions(f"{self.storage}/{run}/{FOLDER}", number, str(run), now=0.0)
        return {contribution.island for contribution in contributions}

    def assert_plain(self, decisions: Sequence[RoundDecision], *, lost: int | None = None, rel: float = 2e-6) -> None:
        """Losses and the last weights are those of a plain loop that follows the same ledger; of an island that is
        lost, the losses up to then."""
        ledger = [{member.island: member.step for member in decision.members} for decision in decisions]
        landed, spec = [landings(workers) for workers in self.groups], self.jobs[0].spec
        model = {name: value for name, value in spec["model"].items() if name != "pace_s"}
        plain_spec = {**spec, "task": "tiny_tasks:Counting", "model": model}
        expected, weights = plain_islands.run(plain_spec, spec["stop"]["steps"], ledger, landed, (1, 1))
        for index, (job, workers) in enumerate(zip(self.jobs, self.groups, strict=True)):
            losses = job.losses(workers)
            assert list(losses) == list(range(1, len(losses) + 1))
            assert losses == pytest.approx({step: expected[index][step] for step in losses}, rel=rel, abs=1e-5)
            if index != lost:
                assert len(losses) == spec["stop"]["steps"]
                plain = squares(weights[index])
                assert squares(last_weights(job).values()) == pytest.approx(plain, rel=max(rel, 1e-5))

    def assert_equal_weights(self) -> None:
        """The outer weights have the same bits on both islands."""
        here, there = (last_weights(job) for job in self.jobs)
        assert all(torch.equal(here[name], there[name]) for name in here)


def _members(rounds: PlayedRounds) -> list[list[int]]:
    return [[member.island for member in decision.members] for decision in rounds.decisions]


def _assert_counted_once(contributions: Sequence[Contribution]) -> None:
    """No step of an island counts in two rounds, and none between two rounds is left out."""
    for island in (0, 1):
        counted = [(sent.from_step, sent.step) for sent in contributions if sent.island == island]
        assert counted[0][0] == 0 and all(before[1] == after[0] for before, after in pairwise(counted)), counted


def _says(worker: Any, text: str) -> bool:
    worker.poll()
    return any(text in line.text for line in worker.logs)


@pytest.fixture
def make_isles(make_job: Callable[..., Job], tmp_path: Path) -> Callable[..., Isles]:
    """Two islands, each with a link of its own to the storage: `tmp_path / "link-1"`."""

    def make(specs: list[dict[str, Any]], *, memory: bool = False) -> Isles:
        jobs = []
        (tmp_path / "storage").mkdir()
        for index, spec in enumerate(specs):
            (tmp_path / f"link-{index}").symlink_to(tmp_path / "storage")
            jobs.append(make_job(f"link-{index}/island-{index}", memory=memory, **spec))
        return Isles(str(tmp_path / "storage"), jobs)

    return make


@contextmanager
def _cut(link: Path) -> Iterator[None]:
    """Every use of the storage over this link fails."""
    target = link.readlink()
    link.unlink()
    link.touch()
    try:
        yield
    finally:
        link.unlink()
        link.symlink_to(target)


@pytest.mark.parametrize("has_sent", [False, True], ids=["before-it-sends", "after-it-has-sent"])
def test_an_island_that_is_cut_off_from_the_storage_trains_on_and_so_do_the_others(
    make_isles: Callable[..., Isles], tmp_path: Path, has_sent: bool
) -> None:
    """The others close rounds without it. When it is back it takes them, and all that it has trained counts."""
    specs = make_specs(60, {0: 0.01, 1: 0.01}, quorum=1, lands_after_steps=2)
    specs[1]["islands"]["grace_s"] = 1.0
    isles = make_isles(specs)
    here, there = isles.start(0, 5, 11), isles.start(1, 5 if has_sent else 3, 9)
    for worker in (here, there):
        worker.reached()
    if has_sent:
        until(lambda: isles.arrived(0) == {0, 1}, "both differences are whole")
    with isles.play(grace_s=0.2) as rounds:
        with _cut(tmp_path / "link-1"):
            for worker in (here, there):
                worker.call("go")
            for worker in (here, there):
                worker.reached()
            until(lambda: len(rounds.decisions) == 2, "the round that island 0 has sent is closed")
            until(lambda: _says(there, "round 0 could not be read"), "the read fails")
            assert _says(there, "round 0 was not written") is not has_sent
            assert _members(rounds) == [[0, 1] if has_sent else [0], [0]]
            assert landings(isles.groups[1]) == {}
        for worker in (here, there):
            worker.call("go")
        isles.end_both(rounds)
    assert [0, 1] in _members(rounds)[2:], "it is a member again"
    _assert_counted_once(rounds.contributions)
    isles.assert_plain(rounds.decisions)


def test_a_storage_that_hangs_while_an_island_sends_holds_up_no_step(
    make_isles: Callable[..., Isles], tmp_path: Path
) -> None:
    """What it sends to the next round does not wait for what hangs."""
    specs = make_specs(60, {0: 0.01, 1: 0.01}, quorum=1)
    specs[1]["islands"]["grace_s"] = 1.0
    isles = make_isles(specs)
    directory = tmp_path / "storage" / "island-0" / FOLDER / round_folder(0) / "island-1" / str(CheckpointName(4, 1, 1))
    with isles.play(grace_s=0.2) as rounds:
        with hanging(directory / "shard-00000.bin.writing", patience_s=PATIENCE_S):
            here, there = isles.start(0), isles.start(1)
            until(lambda: [0, 1] in _members(rounds), "it is a member of a round")
            assert _members(rounds)[0] == [0]
        isles.end_both(rounds)
    assert _says(there, "round 0 was not written") and not _says(here, "was not written")
    _assert_counted_once(rounds.contributions)
    isles.assert_plain(rounds.decisions)


HALF = fully_sharded(2)


@pytest.mark.cells(1, 4)
@pytest.mark.parametrize(
    ("step", "memory", "layout"),
    [(2, False, fully_sharded(1)), (3, False, Layout(dp_replicate=2)), (4, False, fully_sharded(1)), (4, True, None)],
    ids=["trains", "sends", "sent", "in-memory"],
)
def test_an_island_that_moves_in_a_round_changes_nothing_in_it(
    make_isles: Callable[..., Isles], step: int, memory: bool, layout: Layout | None
) -> None:
    """To another node from its checkpoint, or to another layout in memory. The round stays open meanwhile."""
    isles = make_isles(make_specs(14, {}, lands_after_steps=2, compress="int8"), memory=memory)
    isles.start(0)
    isles.start(1, step, layout=HALF).reached()
    if memory:
        job, workers = isles.jobs[1], isles.groups[1]
        for worker in workers:
            worker.call("request_yield", job.generation, False)
        workers[0].call("go")
        source = job.in_memory([worker.exit() for worker in workers], workers)
        assert source.step == step + 1
        layout = Layout(dp_replicate=2)
        job.start(workers, layout=layout, restore_snapshot=source, restore_from=None)
    else:
        assert isles.leave(1, HALF.world_size) == step + 1
        isles.start(1, layout=layout, node_id="n2")
    assert layout is not None
    with isles.play() as rounds:
        isles.end(0)
        isles.end(1, layout.world_size)
    assert [decision.members[1].step for decision in rounds.decisions] == [4, 8, 12]
    _assert_counted_once(rounds.contributions)
    isles.assert_plain(rounds.decisions)
    isles.assert_equal_weights()


def test_an_island_that_is_paused_for_ten_rounds_takes_them_soon_and_is_a_member_again(
    make_isles: Callable[..., Isles],
) -> None:
    """Nobody waits for it meanwhile, and it takes a round in each step or two: not one in `lands_after_steps`."""
    isles = make_isles(make_specs(120, {0: 0.005, 1: 0.02}, quorum=1, every_steps=8, lands_after_steps=7))
    with isles.play() as rounds:
        here, there = isles.start(0, 97), isles.start(1, 12)
        there.reached()
        paused_at = isles.leave(1)
        rounds.training = {0}
        here.reached()
        until(lambda: len(rounds.decisions) == 12, "all that island 0 has sent is closed")
        assert _members(rounds) == [[0, 1], *[[0]] * 11]
        rounds.training = {0, 1}
        isles.start(1)
        until(lambda: 11 in landings(isles.groups[1]), "it has taken all rounds")
        here.call("go")
        isles.end_both(rounds)
    landed = landings(isles.groups[1])
    assert landed[0] == 15 > paused_at and landed[11] < 15 + 11 * 7 // 2, landed
    assert _members(rounds)[12] == [0, 1]
    _assert_counted_once(rounds.contributions)
    isles.assert_plain(rounds.decisions, rel=1e-5)


def test_a_slow_island_misses_rounds_and_the_others_do_not_wait_for_it(make_isles: Callable[..., Isles]) -> None:
    isles = make_isles(make_specs(60, {0: 0.01, 1: 0.05}, quorum=1))
    with isles.play(grace_s=0.1) as rounds:
        isles.start(0)
        isles.start(1)
        isles.end_both(rounds)
    members = _members(rounds)
    assert [0] in members and any(1 in islands for islands in members)
    _assert_counted_once(rounds.contributions)
    isles.assert_plain(rounds.decisions)


def test_a_control_plane_that_is_killed_in_each_round_at_another_place_changes_nothing(
    make_job: Callable[..., Job], tmp_path: Path, migrated: MigratedDatabases
) -> None:
    """Before it notes a difference, before it decides, before it writes the decision, and after it. What the islands
    read is what the ledger has, to the byte."""
    url, storage = migrated.sqlite(tmp_path / "shoal.db"), tmp_path / "storage"
    specs = make_specs(18, {}, lands_after_steps=2)
    with closing(Store.open(url)) as store:
        submit = store.writing(submissions.create)
        for spec in specs:
            spec["islands"]["run"] = None if spec is specs[0] else specs[0]["islands"]["run"]
            document = {**spec, "checkpoint": {"url": str(storage)}}
            [job, *_] = submit(parse_spec(document), idempotency_key=None, now=1.0)
            spec["islands"]["run"] = specs[0]["islands"]["run"] or job.id
        run = specs[0]["islands"]["run"]
        names = (run, "island-1")
        isles = Isles(
            str(storage), [make_job(f"storage/{name}", **spec) for name, spec in zip(names, specs, strict=True)]
        )
        for index in (0, 1):
            isles.start(index)
        for place in ("arrived", "noted", "stored", "written"):
            with subprocess.Popen([warm_python(), str(CLOSER), url, place], stdin=subprocess.PIPE) as closer:
                assert closer.wait(60) == -signal.SIGKILL
        with subprocess.Popen([warm_python(), str(CLOSER), url], stdin=subprocess.PIPE) as closer:
            for index in (0, 1):
                isles.end(index)
            closer.stdin.close()
        ledger = sorted(store.reading(island_rounds.rounds)(run), key=lambda row: row.round)
    decisions = [row.decision for row in ledger if row.decision is not None]
    assert [[member.step for member in decision.members] for decision in decisions] == [
        [4] * 2,
        [8] * 2,
        [12] * 2,
        [16] * 2,
    ]
    for decision in decisions:
        written = storage / run / FOLDER / round_folder(decision.round) / DECISION
        assert written.read_text() == decision.model_dump_json()
    isles.assert_plain(decisions)
    isles.assert_equal_weights()
