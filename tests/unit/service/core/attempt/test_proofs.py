"""A layout that splits a model is proven before its first step; one that a proof refuses is not used again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal_service.core.attempt.messages import Run
from shoal_service.core.attempt.state.parts import Stage
from shoal_service.supervisor.reporting.status import Readings, make_status
from shoal_workers.contract.exception_causes import LAYOUT_REFUSED
from shoal_workers.contract.job import EndReason
from shoal_workers.contract.layout import Layout, plain
from shoal_workers.contract.messages import ErrorReport, ExitKind, Phase, ProofDemand
from shoal_workers.contract.proofs import LayoutProof, ProofOutcome

NewWorld = Callable[..., Any]
ONE_MICRO_BATCH = {
    "data": {"corpus": "python-stdlib"},
    "model": {"num_layers": 4, "num_heads": 4, "dim": 64},
    "batch": {"global_size": 1, "micro_size": 1},
}
"""The data axes can use one worker only, so the planner splits the model."""


def demands(world: Any) -> set[ProofDemand]:
    """What the newest group was asked to prove."""
    generation = world.state.group.generation
    runs = [c.assignment for c in world.commands if isinstance(c, Run) and c.assignment.generation == generation]
    assert runs
    return {run.proof for run in runs}


def refuse(world: Any) -> str:
    """Every rank of the group that forms refuses its layout."""
    words = f"the layout {world.state.group.layout.describe()} trains another model"
    for worker in world.group():
        error = ErrorReport(
            type="LayoutRefused", message=words, traceback="", phase=Phase.BUILDING, mistake=LAYOUT_REFUSED
        )
        world.leave(worker, ExitKind.USER_ERROR, error)
    world.deliver_all()
    return words


def starting(world: Any) -> Any:
    """A world whose first group forms."""
    world.finish_storage()
    world.start_all()
    assert world.state.stage is Stage.FORMING, world.state.stage
    return world


def test_the_data_axes_demand_no_proof(new_world: NewWorld) -> None:
    assert demands(starting(new_world(workers=2))) == {ProofDemand.NONE}


def test_a_layout_that_the_planner_chooses_must_be_proven(new_world: NewWorld) -> None:
    world = starting(new_world(workers=2, **ONE_MICRO_BATCH))
    assert world.state.group.layout.features, "the planner splits the model"
    assert demands(world) == {ProofDemand.REQUIRED}


def test_a_refused_layout_is_not_planned_again_and_costs_no_budget(new_world: NewWorld) -> None:
    world = starting(new_world(workers=2, **ONE_MICRO_BATCH))
    tried: list[Any] = []
    while world.state.group.layout.features:
        layout = world.state.group.layout
        assert not any(other.features <= layout.features for other in tried), (tried, layout)
        tried.append(layout)
        words = refuse(world)
        assert world.end is None and world.state.stage is Stage.FORMING
        assert world.events("layout.refused")[-1]["message"] == words
    assert world.state.group.layout.world_size == 1, "only the data axes are left, and they have one micro-batch"
    assert world.state.budgets.recoveries == world.state.budgets.fruitless == 0
    status = make_status(world.state, Readings(), spec_version=1, now=world.now)
    assert {proof.outcome for proof in status.proofs} == {ProofOutcome.REFUSED}
    assert len(status.proofs) == len(tried)


def test_plain_replicas_of_which_one_does_not_fit_are_followed_by_a_sharded_group(new_world: NewWorld) -> None:
    world = starting(new_world(workers=2, task="mine:Task", data={}, model={}))
    assert world.state.group.layout == plain(2) and demands(world) == {ProofDemand.NONE}
    words = refuse(world)
    assert world.end is None and world.state.stage is Stage.FORMING
    assert world.state.group.layout == Layout(dp_shard=2)
    assert world.state.budgets.recoveries == world.state.budgets.fruitless == 0
    status = make_status(world.state, Readings(), spec_version=1, now=world.now)
    assert [(proof.layout, proof.words) for proof in status.proofs] == [(plain(2), words)]
    reasons = [event["reason"] for event in world.events("generation.forming")]
    assert "plain: every worker has the whole state" in reasons[0]
    assert "unknown_model: the whole state does not fit on each worker" in reasons[1]


def test_a_refused_layout_that_the_spec_fixes_ends_the_job_with_its_sentence(new_world: NewWorld) -> None:
    world = starting(new_world(workers=2, min_workers=2, **ONE_MICRO_BATCH, parallelism={"tp": 2}))
    assert demands(world) == {ProofDemand.IF_POSSIBLE}
    words = refuse(world)
    assert world.end.reason is EndReason.USER_ERROR and world.end.message == words


def test_what_is_proven_is_not_proven_again_and_shows_in_the_status(new_world: NewWorld) -> None:
    world = starting(new_world(workers=2, min_workers=2, **ONE_MICRO_BATCH, parallelism={"tp": 2}))
    proof = LayoutProof(layout=world.state.group.layout, outcome=ProofOutcome.PROVEN, difference=1e-7, seconds=0.8)
    world.join(proof=proof)
    assert world.events("layout.proven")[0]["layout"] == "tp2"
    status = make_status(world.state, Readings(), spec_version=1, now=world.now)
    assert status.proofs == (proof,)
    world.die(1)
    world.obey_interrupts()
    world.break_collectives()
    world.deliver_all()
    world.start_all()
    world.pass_time(5.0)
    assert world.state.group.generation == 2 and demands(world) == {ProofDemand.NONE}


def test_a_proof_answers_for_every_layout_that_uses_no_more() -> None:
    proven = Layout(pp=2, tp=2, dp_shard=2).features
    assert Layout(tp=8).features <= proven and Layout(dp_shard=8).features <= proven
    assert not Layout(cp=2).features <= proven
