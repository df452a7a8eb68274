"""Islands with real groups: each is as a plain loop over all of them, also over a kill and in different layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from kit.processes.played_rounds import PlayedRounds
from kit.processes.server import until
from kit.processes.storage_faults import absent
from kit.worlds import plain_islands
from kit.worlds.trained_islands import landings, last_weights, squares
from shoal_workers.contract.islands import IslandsSpec
from shoal_workers.contract.layout import Layout, Schedule, ShardLevel, fully_sharded
from shoal_workers.contract.messages import ExitKind

STEPS = 14
SPEC: dict[str, Any] = {
    "batch": {"global_size": 8, "micro_size": 4},
    "optimizer": {"lr": 0.02},
    "schedule": {"warmup_steps": 2},
    "stop": {"steps": STEPS},
    "validation": {"samples": 0},
    "elasticity": {"max_workers": 2},
    "seed": 3,
}


@pytest.fixture
def play(tmp_path: Path) -> Iterator[Callable[[IslandsSpec], PlayedRounds]]:
    played: list[PlayedRounds] = []

    def begin(spec: IslandsSpec) -> PlayedRounds:
        played.append(PlayedRounds(str(tmp_path), spec))
        return played[-1]

    yield begin
    for rounds in played:
        rounds.close()


def _spec(num: int, index: int, **islands: Any) -> dict[str, Any]:
    section = {"num": num, "index": index, "every_steps": 4, "grace_s": 100.0, "run": "island-0", **islands}
    return {**SPEC, "islands": section}


def _assert_plain(
    jobs: list[Any],
    groups: list[list[Any]],
    rounds: PlayedRounds,
    shards: Sequence[int] = (1,) * 4,
    *,
    rel: float = 2e-6,
    abs_: float = 1e-5,
) -> None:
    """Losses and the last weights are those of a plain loop that follows the same ledger."""
    ledger = {
        decision.round: {member.island: member.step for member in decision.members} for decision in rounds.decisions
    }
    landed = [landings(workers) for workers in groups]
    expected, weights = plain_islands.run(jobs[0].spec, jobs[0].spec["stop"]["steps"], ledger, landed, shards)
    _assert_announced_losses(expected, rounds)
    for job, workers, plain, last in zip(jobs, groups, expected, weights, strict=True):
        assert job.losses(workers) == pytest.approx(plain, rel=rel, abs=abs_)
        assert squares(last_weights(job).values()) == pytest.approx(squares(last), rel=5 * rel)


def _assert_announced_losses(losses: Sequence[dict[int, float]], rounds: PlayedRounds) -> None:
    assert rounds.contributions
    for sent in rounds.contributions:
        steps = range(sent.from_step + 1, sent.step + 1)
        mean = sum(losses[sent.island][step] for step in steps) / len(steps)
        assert sent.loss == pytest.approx(mean, rel=1e-5)


def _assert_equal_weights(jobs: list[Any]) -> None:
    """The outer weights have the same bits on all islands, in all layouts."""
    first, *others = [last_weights(job) for job in jobs]
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)


def _end(job: Any, workers: list[Any]) -> None:
    ends = [worker.exit() for worker in workers]
    assert {end.kind for end in ends} == {ExitKind.FINISHED}, [end.error for end in ends]
    job.commit(workers)


@pytest.mark.parametrize(
    ("num", "layouts", "islands"),
    [
        (1, [fully_sharded(1)], {}),
        (2, [fully_sharded(2), Layout(dp_replicate=1)], {"lands_after_steps": 2}),
        (2, [fully_sharded(2), Layout(dp_shard=2, shard=ShardLevel.OPTIMIZER)], {"compress": "bf16"}),
        (2, [fully_sharded(1), Layout(dp_replicate=2)], {"compress": "int8", "outer": {"nesterov": False}}),
        (2, [fully_sharded(1), fully_sharded(2)], {"compress": "sparse", "density": 0.1}),
        (2, [fully_sharded(2), fully_sharded(1)], {"fragments": 2, "every_steps": 8, "compress": "int8"}),
    ],
    ids=["one", "two-late", "bf16", "int8", "sparse", "fragments"],
)
def test_islands_train_as_a_plain_loop_over_them(
    make_job: Any, play: Any, num: int, layouts: list[Layout], islands: dict[str, Any]
) -> None:
    specs = [_spec(num, index, **islands) for index in range(num)]
    rounds = play(IslandsSpec.model_validate(specs[0]["islands"]))
    jobs = [make_job(f"island-{index}", **spec) for index, spec in enumerate(specs)]
    groups = [job.workers(layout.world_size) for job, layout in zip(jobs, layouts, strict=True)]
    for job, workers, layout in zip(jobs, groups, layouts, strict=True):
        job.start(workers, layout=layout)
    for job, workers in zip(jobs, groups, strict=True):
        _end(job, workers)
    assert {len(decision.members) for decision in rounds.decisions} == {num}
    ends = [decision.members[0].step for decision in rounds.decisions]
    assert ends == ([4, 8, 12] if "lands_after_steps" in islands else [4, 8, 12, 13])
    _assert_plain(jobs, groups, rounds, [layout.dp_shard for layout in layouts])
    _assert_equal_weights(jobs)


@pytest.mark.parametrize(
    ("num", "layouts", "islands"),
    [
        (2, [fully_sharded(1), fully_sharded(2)], {}),
        (4, [fully_sharded(1)] * 4, {"lands_after_steps": 2, "outer": {"nesterov": False}}),
        (3, [fully_sharded(2), fully_sharded(1), Layout(dp_replicate=1)], {}),
    ],
    ids=["two", "four-late", "three"],
)
def test_pairs_train_as_a_plain_loop_over_them_and_end_as_one_model(
    make_job: Any, play: Any, num: int, layouts: list[Layout], islands: dict[str, Any]
) -> None:
    specs = [_spec(num, index, topology="pairs", **islands) for index in range(num)]
    rounds, jobs, groups = _train(make_job, play, specs, layouts)
    spec, num_pairs = rounds.spec, (num + 1) // 2
    assert [{member.island for member in decision.members} for decision in rounds.decisions] == [
        {*spec.find_islands(number, STEPS)} for number in range(spec.first_of_all(STEPS) + 1)
    ]
    assert rounds.decisions[-1].round == num_pairs * (2 if islands else 3)
    _assert_plain(jobs, groups, rounds)
    _assert_equal_weights(jobs)


def test_an_island_whose_partner_is_late_goes_on_alone_and_the_late_one_draws_near(make_job: Any, play: Any) -> None:
    """Island 3 begins when the first rounds of its partners are closed without it. What each trains is as in a plain
    loop, and the others end as one model."""
    specs = [_spec(4, index, topology="pairs", grace_s=4.0) for index in range(4)]
    for spec in specs:
        spec["stop"] = {"steps": 26}
    rounds = play(IslandsSpec.model_validate(specs[0]["islands"]))
    jobs = [make_job(f"island-{index}", **spec) for index, spec in enumerate(specs)]
    groups = [job.workers(1) for job in jobs]
    for job, workers in zip(jobs[:3], groups[:3], strict=True):
        job.start(workers)
    until(
        lambda: sum(3 in decision.absent for decision in rounds.decisions) == 2,
        "two rounds are closed without island 3",
    )
    jobs[3].start(groups[3])
    for job, workers in zip(jobs[:3], groups[:3], strict=True):
        _end(job, workers)
    rounds.training = {3}
    _end(jobs[3], groups[3])
    landed = landings(groups[3])
    missed = [decision.round for decision in rounds.decisions if 3 in decision.absent]
    assert landed[missed[0]] < landed[missed[1]]
    assert any(member.island == 3 for decision in rounds.decisions for member in decision.members)
    _assert_plain(jobs, groups, rounds)
    _assert_equal_weights(jobs[:3])


@pytest.mark.parametrize("topology", ["all", "pairs"])
@pytest.mark.parametrize("step", [4, 5, 6], ids=["sends", "sent", "landed"])
def test_a_death_changes_nothing_in_rounds(make_job: Any, play: Any, step: int, topology: str) -> None:
    """One of two workers of an island dies; the other one goes on from memory, and sends again what was sent."""
    settings = {"lands_after_steps": 2, "topology": topology, "compress": "bf16" if topology == "all" else "none"}
    specs = [_spec(2, index, **settings) for index in range(2)]
    rounds = play(IslandsSpec.model_validate(specs[0]["islands"]))
    here, there = [make_job(f"island-{index}", memory=True, **spec) for index, spec in enumerate(specs)]
    others = there.workers(1)
    there.start(others)
    survivor, source = here.lose_one_of_two("forward", step)
    assert source.step == step
    here.finish([survivor], restore_snapshot=source)
    _end(there, others)
    assert [decision.members[0].step for decision in rounds.decisions] == [4, 8, 12]
    _assert_plain([here, there], [[survivor], others], rounds)
    _assert_equal_weights([here, there])


def test_an_island_that_comes_late_takes_all_rounds_and_loses_nothing(make_job: Any, play: Any) -> None:
    """Rounds close without the island that has not begun; it takes them one by one, and the others never waited for
    it longer than the grace."""
    specs = [_spec(2, index, quorum=1, grace_s=2.0) for index in range(2)]
    rounds = play(IslandsSpec.model_validate(specs[0]["islands"]))
    jobs = [make_job(f"island-{index}", **spec) for index, spec in enumerate(specs)]
    groups = [job.workers(1) for job in jobs]
    jobs[0].start(groups[0])
    _end(jobs[0], groups[0])
    assert [[member.island for member in decision.members] for decision in rounds.decisions][:2] == [[0], [0]]
    rounds.training = {1}
    jobs[1].start(groups[1])
    _end(jobs[1], groups[1])
    landed = landings(groups[1])
    assert landed[0] < landed[1] < landed[2]
    assert any(member.island == 1 for decision in rounds.decisions for member in decision.members)
    _assert_plain(jobs, groups, rounds)


def test_a_storage_that_is_away_in_a_round_costs_no_step_and_no_sample(
    make_job: Any, play: Any, tmp_path: Path
) -> None:
    """The differences of the first round cannot be written; the islands train on, and write them again."""
    specs = [_spec(2, index, grace_s=6.0) for index in range(2)]  # longer than until the next try to write
    jobs = [make_job(f"island-{index}", **spec) for index, spec in enumerate(specs)]
    groups = [job.workers(1) for job in jobs]
    for worker in (worker for workers in groups for worker in workers):
        worker.strike("forward", 6, "hold")
    (tmp_path / "island-0").mkdir()
    with absent(tmp_path / "island-0" / "islands"):
        for job, workers in zip(jobs, groups, strict=True):
            job.start(workers)
        for [worker] in groups:
            worker.reached()
            until(lambda worker=worker: _says(worker, "round 0 was not written"), "the write fails")
            until(lambda worker=worker: _says(worker, "could not be read"), "the read fails")
    rounds = play(IslandsSpec.model_validate({**specs[0]["islands"], "grace_s": 100.0}))
    for [worker] in groups:
        worker.call("go")
    for job, workers in zip(jobs, groups, strict=True):
        _end(job, workers)
    assert rounds.decisions and {len(decision.members) for decision in rounds.decisions} == {2}
    assert rounds.decisions[0].members[0].step == 4, "what could not be written then"
    _assert_plain(jobs, groups, rounds)
    _assert_equal_weights(jobs)


def _says(worker: Any, text: str) -> bool:
    worker.poll()
    return any(text in line.text for line in worker.logs)


SPARSE = {"compress": "sparse", "density": 0.1}
STAGED = {
    "task": "metered_tasks:Staged",
    "plan": {"blocks": "blocks", "num_blocks": 4, "first": ["embed"], "last": ["head"], "hidden_size": 24},
}
FROZEN = {
    "optimizer": {
        "lr": 0.02,
        "groups": [
            {"match": "embed.*", "frozen": True},
            *({"match": f"blocks.{at}.*", "frozen": True} for at in range(3)),
        ],
    }
}
"""More than the first of two stages."""
PP2 = Layout(pp=2, schedule=Schedule.ONE_F_ONE_B, shard=ShardLevel.OPTIMIZER)


@pytest.mark.parametrize(
    ("layouts", "islands", "changes"),
    [
        ([fully_sharded(2), fully_sharded(1)], {}, {"task": "tiny_tasks:Routed"}),
        ([fully_sharded(1), fully_sharded(2)], {}, {"optimizer": {"name": "adafactor", "lr": 0.05}}),
        ([fully_sharded(2), fully_sharded(1)], {}, {"optimizer": {"name": "muon", "lr": 0.002}}),
        ([PP2, fully_sharded(2)], {"compress": "int8"}, STAGED),
        ([fully_sharded(1), PP2], {"compress": "bf16", "fragments": 2}, STAGED),
        ([fully_sharded(1), PP2], {"compress": "int8"}, STAGED | FROZEN),
    ],
    ids=["routed", "adafactor", "muon", "pp2", "pp2-fragments", "pp2-frozen"],
)
def test_other_models_and_optimizers_are_as_a_plain_loop(
    make_job: Any, play: Any, layouts: list[Layout], islands: dict[str, Any], changes: dict[str, Any]
) -> None:
    """Parameters that only some steps use, or none, are the same on all islands, too."""
    specs = [_spec(2, index, **islands) | changes for index in range(2)]
    rounds, jobs, groups = _train(make_job, play, specs, layouts)
    _assert_plain(jobs, groups, rounds, [layout.dp_shard for layout in layouts])
    _assert_equal_weights(jobs)


def test_an_island_that_goes_back_before_closed_rounds_repeats_them(make_job: Any, play: Any) -> None:
    """It is a member of rounds that it has not ended yet, again: nothing of it counts twice."""
    specs = [_spec(2, index, compress="bf16", lands_after_steps=2) | KEPT for index in range(2)]
    _, jobs, groups = _train(make_job, play, specs, [fully_sharded(2), fully_sharded(1)])
    before, weights = jobs[0].losses(groups[0]), last_weights(jobs[0])
    again = jobs[0].workers(1)
    oldest = next(path for path in sorted(jobs[0].committed) if "step-000000000003" in path)
    jobs[0].finish(again, restore_from=oldest)
    assert jobs[0].losses(again) == pytest.approx({step: before[step] for step in range(4, STEPS + 1)}, abs=1e-5)
    assert landings(again) == landings(groups[0])
    newest = last_weights(jobs[0])
    assert all(torch.equal(weights[name], newest[name]) for name in weights)


def test_a_first_step_that_is_skipped_loses_no_round(make_job: Any, play: Any) -> None:
    """As with fp16, whose scale is too large at first. Islands have no state until their first update."""
    specs = [_spec(2, index) for index in range(2)]
    rounds = play(IslandsSpec.model_validate(specs[0]["islands"]))
    jobs = [make_job(f"island-{index}", **spec) for index, spec in enumerate(specs)]
    groups = [job.workers(1) for job in jobs]
    jobs[0].start(groups[0], skip_steps=(1,))
    jobs[1].start(groups[1])
    for job, workers in zip(jobs, groups, strict=True):
        _end(job, workers)
    assert len(rounds.decisions) == 4
    _assert_equal_weights(jobs)


def test_islands_share_the_epochs_and_the_tokens_of_the_job(make_job: Any, play: Any) -> None:
    specs = [_spec(2, 0) | {"stop": {"epochs": 2}}, _spec(2, 1) | {"stop": {"tokens": 8 * 100}}]
    _, jobs, groups = _train(make_job, play, specs, [fully_sharded(1)] * 2)
    assert [max(job.losses(workers)) for job, workers in zip(jobs, groups, strict=True)] == [7, 7]


KEPT = {"checkpoint": {"every_steps": 3}}


def _train(
    make_job: Any, play: Any, specs: list[dict[str, Any]], layouts: list[Layout]
) -> tuple[PlayedRounds, Any, Any]:
    rounds = play(IslandsSpec.model_validate(specs[0]["islands"]))
    jobs = [make_job(f"island-{index}", **spec) for index, spec in enumerate(specs)]
    groups = [job.workers(layout.world_size) for job, layout in zip(jobs, layouts, strict=True)]
    for job, workers, layout in zip(jobs, groups, layouts, strict=True):
        job.start(workers, layout=layout)
    for job, workers in zip(jobs, groups, strict=True):
        _end(job, workers)
    return rounds, jobs, groups


@pytest.mark.parametrize(
    ("num", "islands"),
    [
        pytest.param(num, islands, marks=[pytest.mark.soak] if num == 4 else [pytest.mark.matrix])
        for num in (1, 2, 4)
        for islands in (
            {},
            {"compress": "bf16"},
            {"compress": "int8"},
            {"compress": "sparse"},
            {"fragments": 2, "compress": "int8"},
            {"topology": "pairs"},
        )
    ],
)
def test_two_hundred_steps_of_islands_are_those_of_a_plain_loop(
    make_job: Any, play: Any, num: int, islands: dict[str, Any]
) -> None:
    """The same bits in each weight: one that differs would be rounded the other way by compression now and then, and
    the losses would be 1e-3 apart after 200 steps."""
    specs = [_spec(num, index, every_steps=20, **islands) for index in range(num)]
    specs = [{**spec, "stop": {"steps": 200}} for spec in specs]
    rounds, jobs, groups = _train(make_job, play, specs, [fully_sharded(1)] * num)
    num_rounds = 20 if "fragments" in islands else 9 * ((num + 1) // 2) + 1 if "topology" in islands else 10
    assert len(rounds.decisions) == num_rounds
    _assert_plain(jobs, groups, rounds, rel=1e-6, abs_=0.0)
    _assert_equal_weights(jobs)
