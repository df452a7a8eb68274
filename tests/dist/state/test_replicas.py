"""Replicas of a shard are sources: nodes may be lost as long as one replica of each shard lives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kit.worlds.layout_cases import spec_of
from shoal_workers.checkpoint.index import payload_name
from shoal_workers.contract.layout import Layout

_STEPS = 5
_CHANGES = {
    "stop": {"steps": _STEPS},
    "checkpoint": {"every_steps": None},
    "snapshot": {"budget": 1.0},
}
_LAYOUTS = {
    "hsdp": Layout(dp_replicate=2, dp_shard=2),
    "dp x tp": Layout(dp_replicate=2, tp=2),
    "pp x dp": Layout(pp=2, dp_replicate=2),
}
_SAMPLE = (("hsdp", 1), ("pp x dp", 0))
"""For `make test`."""


@pytest.mark.parametrize(
    ("name", "replica"),
    [
        pytest.param(name, replica, marks=() if (name, replica) in _SAMPLE else pytest.mark.matrix)
        for name in _LAYOUTS
        for replica in (0, 1)
    ],
)
def test_the_loss_of_all_nodes_of_one_replica_loses_one_step_at_most(
    name: str, replica: int, make_job: Any, plain_run: Any, text: str
) -> None:
    """A survivor may be cut off in the last collective of a step that the lost replica has ended."""
    layout = _LAYOUTS[name]
    spec = spec_of("dense", text, **_CHANGES)
    job = make_job(memory=True, **spec)
    group = [worker for node in range(4) for worker in job.workers(1, f"n{node}")]
    per_stage = layout.world_size // layout.pp
    victims = [worker for rank, worker in enumerate(group) if rank % per_stage * 2 // per_stage == replica]
    survivors = [worker for worker in group if worker not in victims]
    victims[0].strike("forward", 3, "hold")
    job.start(group, layout=layout, restore_from=None)
    victims[0].reached()
    for victim in victims:
        victim.poll()
        victim.kill()
    exits = job.interrupt(survivors)
    source = job.in_memory(exits, survivors)
    assert source.step in (2, 3) and len(source.parts) == 2
    assert {part.node_id for part in source.parts} == {worker.node_id for worker in survivors}
    job.finish(survivors, layout=Layout(dp_shard=2), restore_snapshot=source, restore_from=None)
    assert job.losses(group) == pytest.approx(dict(plain_run(spec).losses), abs=1e-5)


def test_replicas_on_one_node_need_one_copy(make_job: Any, plain_run: Any, text: str) -> None:
    """Both replicas of shard 0 are on node a, both of shard 1 on node b. Node a is lost."""
    steps = 10
    spec = spec_of("dense", text, **{**_CHANGES, "stop": {"steps": steps}})
    job = make_job(memory=True, **spec)
    first, second = job.workers(2, "a"), job.workers(2, "b")
    group = [first[0], second[0], first[1], second[1]]
    first[0].strike("forward", 8, "hold")
    buddies = {0: second[0], 1: first[0]}
    layout = Layout(dp_replicate=2, dp_shard=2)
    job.start(group, layout=layout, restore_from=None, buddy_of=buddies.get)
    first[0].reached()
    first[0].poll()
    for worker in first:
        worker.kill()
    source = job.in_memory(job.interrupt(second), second)
    assert 0 < source.step <= 8 and len(source.parts) == 2
    job.finish(second, layout=Layout(dp_shard=2), restore_snapshot=source, restore_from=None)
    assert job.losses(group) == pytest.approx(dict(plain_run(spec).losses), abs=1e-5)


def test_checkpoints_contain_each_shard_once(make_job: Any, text: str) -> None:
    sizes = []
    for number, layout in enumerate((Layout(dp_shard=2), Layout(dp_replicate=2, dp_shard=2))):
        job = make_job(f"job-{number}", memory=True, **spec_of("dense", text, **_CHANGES))
        job.finish(job.workers(layout.world_size), layout=layout, restore_from=None)
        (directory,) = job.committed
        payloads = (Path(directory, payload_name(rank)) for rank in range(layout.world_size))
        sizes.append(sum(path.stat().st_size for path in payloads))
    assert sizes[0] == sizes[1]
