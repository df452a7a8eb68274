from __future__ import annotations

from typing import Any

from shoal_service.core.stacks import cluster, place, trimmed
from shoal_workers.contract.messages import Frame, Phase, StackSource, WorkerStack


def frames(*lines: str) -> tuple[Frame, ...]:
    parts = [line.split(":") for line in lines]
    return tuple(Frame(file=file, line=int(number), function=function) for file, number, function in parts)


ENGINE = ("shoal_workers/engine/trainer.py:9:_step", "shoal_workers/engine/engine.py:5:run")
IN_ALL_REDUCE = frames(
    "shoal_workers/engine/group/collectives.py:99:wait",
    "site-packages/torch/distributed/distributed_c10d.py:3000:all_reduce",
    "site-packages/torch/distributed/c10d_logger.py:80:wrapper",
    *ENGINE,
)
IN_DATA = frames(
    "python3.11/ssl.py:1:read",
    "shapes.py:41:__getitem__",
    "shoal_workers/engine/step/batches.py:20:training",
    *ENGINE,
)


def stack(number: int, **values: Any) -> WorkerStack:
    known: dict[str, Any] = {"frames": IN_ALL_REDUCE, "phase": Phase.BACKWARD, "step": 40}
    return WorkerStack(worker_id=f"shoal/worker/{number}", **(known | values))


def test_the_rank_that_is_elsewhere_comes_first_and_the_others_are_one_cluster() -> None:
    samples = [(rank, stack(rank)) for rank in range(8) if rank != 3]
    samples.append((3, stack(3, frames=IN_DATA, phase=Phase.FORWARD)))
    found = cluster(samples, at=1.0, generation=2, reason="requested")
    assert found.summary == (
        "rank 3 is in the data loader (shapes.py:41 __getitem__) of step 41; "
        "ranks 0-2, 4-7 are waiting in the all-reduce of step 41, in the backward pass"
    )
    assert [one.ranks for one in found.clusters] == [(3,), (0, 1, 2, 4, 5, 6, 7)]
    assert found.clusters[0].frames == IN_DATA


def test_equal_frames_of_other_steps_are_other_places() -> None:
    found = cluster([(0, stack(0)), (1, stack(1, step=39))], at=0.0, generation=1, reason="")
    assert len(found.clusters) == 2


def test_py_spy_knows_no_step_so_its_stacks_are_distinguished_by_frames_only() -> None:
    spied = {"source": StackSource.PY_SPY, "phase": Phase.IDLE}
    found = cluster([(0, stack(0, **spied)), (1, stack(1, **spied))], at=0.0, generation=1, reason="")
    assert [one.ranks for one in found.clusters] == [(0, 1)]


def test_each_place_has_words() -> None:
    vote = frames(
        "site-packages/torch/distributed/distributed_c10d.py:1:all_reduce",
        "shoal_workers/engine/step/vote.py:1:hold_vote",
    )
    assert place(stack(0, frames=vote, phase=Phase.BACKWARD)) == "waiting in the vote of step 41"
    update = frames("shoal_workers/engine/loop/gradients.py:1:wait_for_sums", *ENGINE)
    assert place(stack(0, frames=update, phase=Phase.BACKWARD)) == (
        "waiting in the all-reduce of step 41, in the backward pass"
    )
    validated = frames(
        "shoal_workers/engine/group/collectives.py:1:wait",
        "shoal_workers/engine/group/all_ranks.py:2:wait",
        "shoal_workers/engine/group/all_ranks.py:1:all_reduce",
        "shoal_workers/engine/step/validation.py:1:run",
        *ENGINE,
    )
    assert place(stack(0, frames=validated, phase=Phase.VALIDATING)) == "waiting in the all-reduce, in the validation"
    layer = stack(0, frames=frames("model.py:7:forward", *ENGINE), module="blocks.6", phase=Phase.FORWARD)
    assert place(layer) == "in the forward pass of step 41, blocks.6 (model.py:7 forward)"
    gathering = frames("site-packages/torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py:1:wait_for_unshard")
    assert place(stack(0, frames=gathering, module="blocks.6", phase=Phase.FORWARD)) == (
        "waiting in the all-gather of step 41, in the forward pass, blocks.6"
    )
    assert place(stack(0, frames=(), phase=Phase.IDLE)) == "idle"
    assert place(stack(0, frames=(), error="process 7 has ended")) == "not to be seen: process 7 has ended"
    saving = frames("shoal_workers/engine/state/saving.py:3:save", *ENGINE)
    assert place(stack(0, frames=saving, phase=Phase.SAVING)) == "in a checkpoint (saving.py:3 save)"


def test_workers_without_a_rank_are_named_by_their_number() -> None:
    found = cluster([(None, stack(4, frames=()))], at=0.0, generation=0, reason="")
    assert found.summary == "worker 4 is idle"


def test_what_is_kept_is_bounded() -> None:
    deep = frames(*(f"a.py:{line}:f" for line in range(90)))
    found = cluster([(rank, stack(rank, step=rank, frames=deep)) for rank in range(50)], at=0, generation=1, reason="")
    kept = trimmed(found)
    assert len(found.clusters) == 50 and len(kept.clusters) == 16
    assert {len(one.frames) for one in kept.clusters} == {40}
    assert found.summary.endswith("and 46 other stacks")
