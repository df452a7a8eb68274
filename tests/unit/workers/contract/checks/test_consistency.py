"""Settings that exclude each other are refused; what is probably not meant is said."""

from typing import Any

import pytest

from shoal_workers.contract.checks.consistency import capacity_remark, remarks
from shoal_workers.contract.checks.legality import is_plain_by_default
from shoal_workers.contract.checks.spec_errors import SpecError, parse_spec
from shoal_workers.contract.spec import JobSpec, Precision

DATA = {"corpus": "python-stdlib"}


def _refused(**spec: Any) -> dict[str, str]:
    with pytest.raises(SpecError) as refusal:
        parse_spec({"data": DATA, "stop": {"steps": 1}, **spec})
    return {problem.path: problem.message for problem in refusal.value.problems}


@pytest.mark.parametrize(
    ("path", "setting"),
    [
        ("optimizer.fused", {"optimizer": {"fused": True}}),
        ("reduce_precision", {"reduce_precision": "bf16"}),
        ("reduce_precision", {"reduce_precision": "int8"}),
        ("compile", {"compile": True}),
    ],
)
def test_deterministic_refuses_what_rounds_otherwise(path: str, setting: dict[str, Any]) -> None:
    assert set(_refused(deterministic=True, **setting)) == {path}
    assert parse_spec({"data": DATA, "stop": {"steps": 1}, **setting})


def test_deterministic_leaves_the_fused_update_to_auto() -> None:
    assert parse_spec({"data": DATA, "stop": {"steps": 1}, "deterministic": True}).optimizer.fused == "auto"


def test_compile_needs_to_know_the_blocks() -> None:
    spec = {"task": "mine:Task", "compile": True}
    assert "plan.blocks" in _refused(**spec)["compile"]
    assert parse_spec({**spec, "stop": {"steps": 1}, "plan": {"blocks": "layers", "num_blocks": 2}}).compile


@pytest.mark.parametrize("key", ["precision", "reduce_precision"])
def test_fp8_is_no_precision_and_the_message_has_the_setting(key: str) -> None:
    message = _refused(**{key: "fp8"})[key]
    assert "precision: bf16 and fp8: tensorwise" in message


def test_fp8_needs_bf16_and_a_built_in_task() -> None:
    assert "Set precision to bf16" in _refused(fp8="tensorwise")["fp8"]
    assert "own" in _refused(fp8="rowwise", precision="bf16", task="mine:Task")["fp8"]
    assert parse_spec({"data": DATA, "stop": {"steps": 1}, "precision": "bf16", "fp8": "rowwise"}).fp8 == "rowwise"


def test_a_vocabulary_that_is_too_small_for_bytes_is_refused() -> None:
    """The job used to fail when its workers had started."""
    assert (
        "Leave model.vocab_size out, or set it to at least 257."
        in _refused(model={"vocab_size": 100})["model.vocab_size"]
    )
    for model, data in (({"vocab_size": 257}, DATA), ({"vocab_size": 100}, DATA | {"tokenizer": "/t.json"})):
        assert parse_spec({"data": data, "model": model, "stop": {"steps": 1}})


def spec(**changes: Any) -> JobSpec:
    return JobSpec.model_validate({"stop": {"steps": 100}, **changes})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"schedule": {"warmup_steps": 100}}, []),
        ({"schedule": {"warmup_steps": 101}}, ["schedule.warmup_steps 101 is more than stop.steps 100"]),
        ({"schedule": {"warmup_steps": 101}, "stop": {"epochs": 1}}, []),
        ({"checkpoint": {"every_steps": None, "every_s": 60}}, []),
        ({"checkpoint": {"every_steps": None}}, ["checkpoint.every_steps and checkpoint.every_s are both null"]),
    ],
)
def test_what_is_probably_not_meant_is_said(changes: dict[str, Any], expected: list[str]) -> None:
    found = list(remarks(spec(**changes)))
    assert len(found) == len(expected)
    assert all(remark.startswith(words) for remark, words in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("worker", "nodes", "room"),
    [
        ({}, [(4.0, 0.0)], 4),
        ({"cpus": 1.5}, [(4.0, 0.0), (1.0, 0.0), (3.0, 0.0)], 4),
        ({"gpus": 1}, [(64.0, 2.0), (1.0, 8.0), (64.0, 0.0)], 3),
        ({"cpus": 0.5}, [(4.0, 0.0)], None),
        ({"cpus": 0}, [], None),
        ({}, [(4.0, 0.0), (4.0, 0.0)], None),
    ],
)
def test_more_workers_than_the_cluster_has_room_for_are_remarked(
    worker: dict[str, Any], nodes: list[tuple[float, float]], room: int | None
) -> None:
    remark = capacity_remark(spec(worker=worker, elasticity={"max_workers": 8}), nodes)
    if room is None:
        assert remark == ""
    else:
        assert f"elasticity.max_workers is 8, and the cluster has room for {room} workers with" in remark


@pytest.mark.parametrize(
    ("parallelism", "path", "words"),
    [
        ({"tp": 2}, "parallelism.tp", "parallelism.tp is 2, and a loop is sharded by dp_replicate and dp_shard only"),
        ({"offload": True}, "parallelism.offload", "Remove parallelism.offload, or train as a task"),
        ({"shard": "optimizer"}, "parallelism.shard", "Set it to gradients, which keeps parameters whole"),
        ({"shard": "none"}, "parallelism.shard", "Remove the section parallelism."),
    ],
)
def test_a_loop_has_the_data_axes_only(parallelism: Any, path: str, words: str) -> None:
    with pytest.raises(SpecError) as refused:
        parse_spec({"loop": {"file": "train.py"}, "parallelism": parallelism})
    [problem] = refused.value.problems
    assert problem.path == path and words in problem.message


@pytest.mark.parametrize(
    ("changes", "path", "words"),
    [
        ({"parallelism": {"shard": "none", "dp_shard": 2}}, "parallelism.dp_shard", "Remove parallelism.dp_shard (2)"),
        ({"parallelism": {"shard": "none", "tp": 2}}, "parallelism.tp", "every worker has the whole model"),
        ({"precision": "bf16"}, "parallelism.shard", "precision is bf16"),
        ({"reduce_precision": "bf16"}, "parallelism.shard", "reduce_precision is bf16"),
        ({"deterministic": True}, "parallelism.shard", "deterministic is true"),
        ({"module_precision": {"head": "bf16"}}, "parallelism.shard", "module_precision gives some modules"),
        ({"parallelism": {"shard": "none", "offload": True}}, "parallelism.shard", "parallelism.offload is true"),
    ],
)
def test_shard_none_leaves_the_model_whole_and_its_parameters_as_they_are(changes: Any, path: str, words: str) -> None:
    with pytest.raises(SpecError) as refused:
        parse_spec({"task": "mine:Task", "stop": {"steps": 1}, "parallelism": {"shard": "none"}, **changes})
    [problem] = refused.value.problems
    assert problem.path == path and words in problem.message


def test_gradients_in_8_bits_leave_parameters_as_they_are() -> None:
    task = {"task": "mine:Task", "stop": {"steps": 1}, "reduce_precision": "int8"}
    spec = parse_spec({**task, "parallelism": {"shard": "none"}})
    assert parse_spec(spec.model_dump(mode="json")) == spec and spec.sum_precision is Precision.FP32
    assert is_plain_by_default(parse_spec(task))
    with pytest.raises(SpecError, match="must be 'fp32', 'bf16' or 'fp16' or 'int8'"):
        parse_spec({**task, "reduce_precision": "int4"})


def test_the_degrees_of_a_loop_survive_json() -> None:
    spec = parse_spec({"loop": {"file": "train.py"}, "parallelism": {"dp_shard": "auto", "dp_replicate": 2}})
    assert parse_spec(spec.model_dump(mode="json")) == spec


def test_islands_exclude_what_would_be_two_averages_or_two_histories() -> None:
    islands = {"islands": {"num": 2, "index": 0}}
    assert "Leave one out" in _refused(**islands, optimizer={"ema_decay": 0.99})["optimizer.ema_decay"]
    origin = {"continue_from": {"job": "job-1"}}
    assert "set init_from to an export" in _refused(**islands, **origin)["continue_from"]
    assert parse_spec({"data": DATA, "stop": {"steps": 1}, **islands}).islands


def test_a_script_has_no_islands() -> None:
    assert "islands" in _refused(data={}, script={"command": ["true"]}, islands={"num": 2, "index": 0})
