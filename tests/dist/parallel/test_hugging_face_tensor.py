"""Model types of transformers that have a tensor plan compute the same when two ranks have half of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shoal_workers.contract.model import TIED_BY_DEFAULT

pytest.importorskip("transformers")
pytestmark = [pytest.mark.dist, pytest.mark.matrix]


@pytest.fixture(scope="module")
def differences(answer_of: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """By model type."""
    return answer_of("hugging_face_tensor.py")


@pytest.mark.parametrize("model_type", sorted(TIED_BY_DEFAULT))
def test_two_halves_of_a_model_compute_the_same_as_the_full_model(differences: dict[str, Any], model_type: str) -> None:
    assert differences[model_type]["loss"] < 1e-5
    assert differences[model_type]["gradient"] < 1e-4
