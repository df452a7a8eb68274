"""If the layout does not change, survivors reuse their model object under every kind of sharding, also twice in a
row."""

from __future__ import annotations

from typing import Any

import pytest

from kit.worlds.layout_cases import spec_of
from shoal_workers.contract.layout import ContextMethod, Layout, Schedule, ShardLevel

_STEPS = 6
_KILLS = (2, 4)
"""Steps in which a rank is killed."""
_CASES = {"pp2xtp2": ("dense", Layout(pp=2, tp=2))}
_MORE = {
    "replicas of shards": ("dense", Layout(dp_replicate=2, dp_shard=2)),
    "experts": ("experts", Layout(dp_shard=2, ep=2)),
    "tp2": ("dense", Layout(tp=2)),
    "shards and tp2": ("dense", Layout(dp_shard=2, tp=2)),
    "pp2 zbv": ("dense", Layout(pp=2, schedule=Schedule.ZERO_BUBBLE_V, stages=(1, 1, 1, 1))),
    "pp2 interleaved, replicas": (
        "dense",
        Layout(pp=2, dp_replicate=2, schedule=Schedule.INTERLEAVED, stages=(1, 1, 1, 1)),
    ),
    "cp2": ("dense", Layout(cp=2)),
    "cp2 ulysses, tp2": ("dense", Layout(cp=2, tp=2, context=ContextMethod.ULYSSES)),
    "experts and tp2": ("experts", Layout(dp_shard=2, ep=2, tp=2)),
}


@pytest.mark.parametrize(
    "phase", ["backward", *(pytest.param(p, marks=pytest.mark.matrix) for p in ("forward", "optimizer"))]
)
@pytest.mark.parametrize("name", [*_CASES, *(pytest.param(name, marks=pytest.mark.matrix) for name in _MORE)])
def test_survivors_keep_their_model_and_the_losses_do_not_change(
    make_job: Any, plain_run: Any, text: str, name: str, phase: str
) -> None:
    _kill_twice(make_job, plain_run, text, *(_CASES | _MORE)[name], phase)


@pytest.mark.slow
def test_a_gather_that_is_under_way_when_a_rank_dies_is_left(make_job: Any, plain_run: Any, text: str) -> None:
    """The backward passes of this schedule end with parameters that are gathered for a next one."""
    layout = Layout(pp=2, dp_shard=2, schedule=Schedule.ZERO_BUBBLE_V, stages=(1, 1, 1, 1), shard=ShardLevel.GRADIENTS)
    _kill_twice(make_job, plain_run, text, "dense", layout, "optimizer")


def _kill_twice(make_job: Any, plain_run: Any, text: str, model: str, layout: Layout, phase: str) -> None:
    spec = spec_of(model, text, stop={"steps": _STEPS}, snapshot={"budget": 1.0})
    job = make_job(memory=True, **spec)
    group = job.workers(layout.world_size)
    survivors, models, source = group[:-1], [], None
    for step in _KILLS:
        victim = group[-1]
        victim.strike(phase, step, "kill")
        job.start(group, layout=layout, restore_from=None, restore_snapshot=source)
        assert victim.died()
        exits = job.interrupt(survivors)
        models.append([worker.call("model_id") for worker in survivors])
        group = [*survivors, *job.workers(1)]
        source = job.in_memory(exits, group)
        assert source.step in (step, step + 1)
    job.finish(group, layout=layout, restore_from=None, restore_snapshot=source)
    models.append([worker.call("model_id") for worker in survivors])
    assert models == [models[0]] * 3
    assert job.losses(group) == pytest.approx(plain_run(spec).losses, abs=1e-5)
