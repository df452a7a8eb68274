"""Parameters of any dtype and form are trained as torch trains them, in one process and divided among several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from kit.worlds import plain_reference
from shoal_workers.contract.layout import Layout, ShardLevel
from shoal_workers.contract.messages import ExitKind
from shoal_workers.contract.worker_reports import StepReport, ValidationReport
from shoal_workers.export import export

STEPS = 6
SPEC: dict[str, Any] = {
    "task": "odd_tensors:Task",
    "batch": {"global_size": 8, "micro_size": 2},
    "optimizer": {"lr": 0.05, "clip_norm": 0.3, "weight_decay": 0.1, "eps": 1e-3},
    "schedule": {"warmup_steps": 2},
    "stop": {"steps": STEPS},
    "checkpoint": {"every_steps": None},
    "validation": {"samples": 0},
    "elasticity": {"max_workers": 4},
    "seed": 7,
}
REAL = {"float64": 1e-6, "float32": 1e-6, "bfloat16": 4e-3, "float16": 1e-3}
COMPLEX = {"complex64": 1e-6, "complex128": 1e-6}


def found(job: Any, world_size: int, **how: Any) -> list[tuple[float, float]]:
    workers = job.workers(world_size)
    job.finish(workers, **how)
    return [(report.loss, report.grad_norm) for report in job.reported(workers, StepReport)]


def assert_as_plain(seen: list[tuple[float, float]], spec: dict[str, Any], tolerance: float) -> None:
    plain = plain_reference.losses(spec, STEPS)
    assert len(seen) == STEPS
    assert seen == [pytest.approx(plain[step][:2], rel=tolerance, abs=1e-6) for step in range(1, STEPS + 1)]


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        pytest.param(name, tolerance, marks=() if name in ("complex64", "bfloat16") else pytest.mark.matrix)
        for name, tolerance in {**REAL, **COMPLEX}.items()
    ],
)
def test_parameters_of_every_dtype_beside_others_train_as_in_torch(make_job: Any, dtype: str, tolerance: float) -> None:
    """Each in one FSDP unit with parameters of other dtypes; 9 rows on 1, and 3 + 3 + 3 or less on 3 ranks."""
    spec = {**SPEC, "model": {"of": dtype}}
    assert_as_plain(found(make_job("one", **spec), 1), spec, tolerance)
    assert_as_plain(found(make_job("three", **spec), 3), spec, tolerance)


@pytest.mark.parametrize(
    "layout",
    [Layout(dp_shard=2, shard=ShardLevel.OPTIMIZER), Layout(dp_shard=2, dp_replicate=2)],
    ids=Layout.describe,
)
def test_other_layouts_of_the_data_axis_keep_the_dtypes(make_job: Any, layout: Layout) -> None:
    spec = {**SPEC, "model": {"of": "complex64"}, "health": {"checksum_every_steps": 2}}
    assert_as_plain(found(make_job(**spec), layout.world_size, layout=layout), spec, 1e-6)


def test_half_precision_of_a_job_leaves_complex_parameters_and_integers_as_they_are(make_job: Any) -> None:
    spec = {**SPEC, "model": {"of": "complex64"}}
    seen = found(make_job(**spec, precision="bf16", reduce_precision="bf16"), 2)
    plain = plain_reference.losses(spec, STEPS)
    assert [loss for loss, _ in seen] == pytest.approx([plain[step][0] for step in range(1, STEPS + 1)], rel=2e-2)


@pytest.mark.parametrize("dtype", ["complex64", pytest.param("bfloat16", marks=pytest.mark.matrix)])
def test_deterministic_mode_has_the_same_bits_for_every_dtype(make_job: Any, dtype: str) -> None:
    spec = {**SPEC, "model": {"of": dtype}, "deterministic": True}
    one = found(make_job("one", **spec), 1)
    assert one == found(make_job("three", **spec), 3)
    assert_as_plain(one, spec, {**REAL, **COMPLEX}[dtype])


@pytest.mark.parametrize("world_size", [1, 3])
def test_parameters_of_every_form_train_as_in_torch(make_job: Any, world_size: int) -> None:
    spec = {**SPEC, "task": "odd_tensors:Forms"}
    assert_as_plain(found(make_job(**spec), world_size), spec, 1e-5)


@pytest.mark.slow
def test_deterministic_mode_takes_parameters_of_every_form(make_job: Any) -> None:
    spec = {**SPEC, "task": "odd_tensors:Forms", "deterministic": True}
    one = found(make_job("one", **spec), 1)
    assert one == found(make_job("three", **spec), 3)
    assert_as_plain(one, spec, 1e-5)


@pytest.mark.parametrize("restores_from", ["checkpoint", "memory"])
def test_a_killed_worker_changes_nothing_for_complex_parameters(make_job: Any, restores_from: str) -> None:
    spec = {**SPEC, "model": {"of": "complex64"}, "checkpoint": {"every_steps": 2}}
    job = make_job(memory=restores_from == "memory", **spec)
    workers = job.workers(3)
    if restores_from == "memory":
        source = job.lose(workers, workers[2], "forward", 4)
    else:
        workers[0].strike("forward", 4, "hold")
        generation, source = job.start(workers), None
        workers[0].reached()
        job.wait_until_committed(workers, 4)
        workers[2].kill()
        assert workers[2].died()
        workers[0].call("interrupt", generation)
        workers[0].call("go")
        job.interrupt(workers[:2])
    job.finish(workers[:2], restore_snapshot=source)
    plain = plain_reference.losses(spec, STEPS)
    losses = job.losses(workers[:2])
    assert losses == pytest.approx({step: plain[step][0] for step in losses}, rel=1e-6, abs=1e-6)
    assert STEPS in losses


def test_a_scalar_is_exported_without_a_dimension_and_a_job_begins_with_it(make_job: Any, tmp_path: Path) -> None:
    spec = {**SPEC, "task": "odd_tensors:Forms", "validation": {"samples": 8}}
    job = make_job("first", **spec)
    workers = job.workers(3)
    job.finish(workers)
    export(job.root, tmp_path / "out")
    shapes = {name: list(tensor.shape) for name, tensor in load_file(tmp_path / "out" / "model.safetensors").items()}
    assert {name: shapes[name] for name in ("scale", "heat.shift", "wide")} == {
        "scale": [],
        "heat.shift": [],
        "wide": [16, 3],
    }
    tiny = {"optimizer": {"lr": 1e-12}, "stop": {"steps": 1}, "init_from": str(tmp_path / "out")}
    second = make_job("second", **{**spec, **tiny})
    again = second.workers(2)
    assert [end.kind for end in second.run(again)] == [ExitKind.FINISHED] * 2
    [before], [after] = job.reported(workers, ValidationReport), second.reported(again, ValidationReport)
    assert after.loss == pytest.approx(before.loss, rel=1e-6)
