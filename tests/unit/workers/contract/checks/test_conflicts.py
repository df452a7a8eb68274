from __future__ import annotations

from typing import Any

import pytest

from shoal_workers.contract.checks.spec_errors import SpecError, parse_spec

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
def test_fp8_is_refused_with_what_it_would_need(key: str) -> None:
    message = _refused(**{key: "fp8"})[key]
    assert "8.9" in message and "bf16" in message


def test_a_vocabulary_that_is_too_small_for_bytes_is_refused() -> None:
    """The job used to fail when its workers had started."""
    assert (
        "Leave model.vocab_size out, or set it to at least 257."
        in _refused(model={"vocab_size": 100})["model.vocab_size"]
    )
    for model, data in (({"vocab_size": 257}, DATA), ({"vocab_size": 100}, DATA | {"tokenizer": "/t.json"})):
        assert parse_spec({"data": data, "model": model, "stop": {"steps": 1}})
