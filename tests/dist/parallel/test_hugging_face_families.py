"""Every family of transformers on every axis that it has computes what the model of transformers does, and its export
is that model. What a family lacks is refused in words."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kit.processes.warm import warm_python
from kit.worlds.encoder_worlds import MODELS
from shoal_workers.contract.families import FAMILIES

pytest.importorskip("transformers")
ROOT = Path(__file__).parents[3]
VARIANTS = ("llama, tied", "gemma2, own head", "mixtral, router loss", "qwen3_moe, router loss")
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The answer of bench/hugging_face.py by row."""
    return _rows(tmp_path_factory, *sorted(FAMILIES), *VARIANTS)


def _rows(tmp_path_factory: pytest.TempPathFactory, *names: str) -> dict[str, dict[str, Any]]:
    file = tmp_path_factory.mktemp("rows") / "rows.json"
    program = subprocess.run(
        [warm_python(), ROOT / "bench" / "hugging_face.py", *names, "--json", file],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert file.exists(), program.stderr
    return {row["family"]: row for row in json.loads(file.read_text())}


@pytest.fixture(scope="module")
def rows_of_encoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The same of models that are no causal language models."""
    return _rows(tmp_path_factory, *MODELS)


@pytest.mark.matrix
@pytest.mark.parametrize("name", [*sorted(FAMILIES), *VARIANTS])
def test_a_family_trains_and_exports_as_transformers_does(rows: dict[str, dict[str, Any]], name: str) -> None:
    _check(rows[name], name)


@pytest.mark.matrix
@pytest.mark.parametrize("name", MODELS)
def test_an_encoder_trains_and_exports_as_transformers_does(
    rows_of_encoders: dict[str, dict[str, Any]], name: str
) -> None:
    _check(rows_of_encoders[name], name)
    assert set(rows_of_encoders[name]["differences"]) == {"dp"}


def _check(row: dict[str, Any], name: str) -> None:
    assert row["loss"] < TOLERANCE, "the loss of transformers"
    assert row["export"] < TOLERANCE, "the logits of what is exported"
    assert not row["wrong"], row["wrong"]
    assert "dp" in row["differences"]
    assert max(row["differences"].values()) < TOLERANCE, row["differences"]
    axes = {"tp", "pp", "ep", "cp"}
    assert set(row["differences"]) | set(row["refused"]) >= axes
    for axis, words in row["refused"].items():
        assert f"{axis} is 2, but the architecture {name.split(',')[0]!r} has no plan for {axis} (" in words
    assert axes - set(row["refused"]) == set(row["differences"]) & axes


def test_ranks_without_tokens_take_part_in_the_exchange_of_routed_experts(answer_of: Callable[..., Any]) -> None:
    differences = answer_of("routed_experts.py")
    assert set(differences) == {"all experts", "one rank has all tokens", "frozen tokens"}
    assert max(differences.values()) < 1e-6, differences
