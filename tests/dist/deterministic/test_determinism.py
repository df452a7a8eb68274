"""Deterministic mode: the same bits at every world size and after every incident. Without it: 1e-5 over 200 steps."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal_workers.checkpoint.commit import newest_committed
from shoal_workers.checkpoint.index import ShardIndex
from shoal_workers.checkpoint.reader import load
from shoal_workers.contract.messages import ExitKind
from shoal_workers.contract.worker_reports import StepReport, ValidationReport

STEPS = 10
SPEC: dict[str, Any] = {
    "batch": {"global_size": 14, "micro_size": 2},  # 7 micro-batches: padding at every world size but 1
    "optimizer": {"lr": 0.02, "clip_norm": 0.5},
    "schedule": {"warmup_steps": 3},
    "stop": {"steps": STEPS},
    "checkpoint": {"every_steps": 2},
    "validation": {"every_steps": 5, "samples": 9},
    "elasticity": {"max_workers": 6},
    "deterministic": True,
    "seed": 7,
}
Bits = dict[str, str]


@pytest.fixture(scope="module")
def known() -> dict[str, Bits]:
    """What the first run of a kind gave; the others must give the same."""
    return {}


def reported(workers: list[Any]) -> Bits:
    """Every reported number by name, bit for bit. A step that was repeated must report the same numbers."""
    seen: Bits = {}
    for worker in workers:
        for item in worker.poll():
            values: dict[str, float] = {}
            if isinstance(item, StepReport):
                values = {f"loss {item.step}": item.loss, f"norm {item.step}": item.grad_norm}
            if isinstance(item, ValidationReport):
                values = {f"validation {item.step}": item.loss}
            for name, value in values.items():
                assert seen.setdefault(name, value.hex()) == value.hex(), name
    return seen


def digest(root: str) -> str:
    """A hash of all parameters and optimizer state of the newest checkpoint, by any number of ranks."""
    directory = newest_committed(root)
    assert directory is not None
    state = {}
    for index in sorted(Path(directory.removeprefix("file://")).glob("shard-*.json")):
        for item in ShardIndex.from_json(index.read_bytes()).items:
            state[item.fqn] = torch.zeros(item.shape, dtype=getattr(torch, item.dtype))
    load(state, directory=directory)
    sha = hashlib.sha256()
    for name in sorted(state):
        sha.update(name.encode() + state[name].numpy().tobytes())
    return sha.hexdigest()


def whole_run(make_job: Any, world_size: int, spec: dict[str, Any]) -> Bits:
    job = make_job(f"world-{world_size}", **spec)
    workers = job.workers(world_size)
    job.finish(workers)
    return {**reported(workers), "state": digest(job.root)}


@pytest.mark.parametrize(
    "world_size", [1, pytest.param(2, marks=pytest.mark.matrix), 3, pytest.param(4, marks=pytest.mark.matrix)]
)
def test_losses_norms_validation_and_state_have_the_same_bits_at_every_world_size(
    make_job: Any, known: dict[str, Bits], world_size: int
) -> None:
    seen = whole_run(make_job, world_size, SPEC)
    assert len(seen) == 2 * STEPS + 2 + 1
    assert known.setdefault("plain", seen) == seen


@pytest.mark.soak
@pytest.mark.parametrize("world_size", [5, 6])
def test_larger_worlds_give_the_same_bits(make_job: Any, known: dict[str, Bits], world_size: int) -> None:
    seen = whole_run(make_job, world_size, SPEC)
    assert known.setdefault("plain", seen) == seen


def test_a_killed_rank_and_two_other_world_sizes_change_no_bit(make_job: Any, known: dict[str, Bits]) -> None:
    job = make_job(**SPEC)
    workers = job.workers(4)
    workers[0].strike("forward", 4, "hold")
    job.start(workers)
    workers[0].reached()
    job.wait_until_committed(workers, 4)
    workers[2].strike("backward", 5, "kill")
    workers[0].call("go")
    assert workers[2].died()
    survivors = [workers[0], workers[1], workers[3]]
    job.interrupt(survivors)
    survivors[0].strike("backward", 6, "hold")
    generation = job.start(survivors)
    survivors[0].reached()
    survivors[1].call("request_yield", generation)
    survivors[0].call("go")
    assert {(e.kind, e.step) for e in (worker.exit() for worker in survivors)} == {(ExitKind.YIELDED, 7)}
    job.commit(survivors)
    again = survivors + job.workers(1)
    job.finish(again)
    seen = {**reported(again), "state": digest(job.root)}
    if "plain" not in known:
        known["plain"] = whole_run(make_job, 1, SPEC)
    assert seen == known["plain"]


def test_deterministic_losses_equal_the_plain_run_within_rounding(
    make_job: Any, known: dict[str, Bits], reference: Any
) -> None:
    seen = known.get("plain") or whole_run(make_job, 1, SPEC)
    losses = {step: float.fromhex(seen[f"loss {step}"]) for step in range(1, STEPS + 1)}
    assert losses == pytest.approx(reference(STEPS, **SPEC), abs=1e-5)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "bf16"},
        {"task": "tiny_tasks:Augmenting", "optimizer": {"lr": 0.3}},
        {"task": "tiny_tasks:Routed"},
        {"task": "tiny_tasks:Steep", "model": {"on": 3}},
    ],
    ids=[
        "bf16",
        "its own optimizer and random data",
        "parameters without gradients",
        "gradients beyond the usual scale",
    ],
)
def test_runs_with_other_settings_have_the_same_bits(make_job: Any, changes: dict[str, Any]) -> None:
    spec = {**SPEC, "stop": {"steps": 6}, "validation": {"samples": 0}, **changes}
    assert whole_run(make_job, 1, spec) == whole_run(make_job, 3, spec)


def test_a_gradient_that_is_not_finite_ends_the_generation(make_job: Any) -> None:
    job = make_job(**{**SPEC, "task": "tiny_tasks:Failing", "model": {"fail": "nan", "on": 5}})
    workers = job.workers(3)
    exits = job.run(workers)
    assert [e.kind for e in exits] == [ExitKind.NON_FINITE] * 3
    assert len({e.step for e in exits}) == 1
