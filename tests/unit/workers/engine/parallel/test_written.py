"""A write to a parameter through `data` changes its mark, whatever the values are before and after."""

from __future__ import annotations

import pytest
import torch

from shoal_workers.engine.parallel.written import mark_of


@pytest.mark.parametrize("size", [1, 2, 6, 7])
def test_a_constant_that_replaces_a_constant_is_seen(size: int) -> None:
    parameter = torch.ones(size)
    before = mark_of(parameter, is_hashed=True)
    assert mark_of(parameter, is_hashed=True) == before
    parameter.data.fill_(10.0)
    assert mark_of(parameter, is_hashed=True) != before


def test_values_that_are_no_numbers_are_equal_to_themselves_and_an_empty_parameter_has_a_mark() -> None:
    for parameter in (torch.tensor([float("nan"), 1.0]), torch.zeros(0), torch.ones(3, dtype=torch.complex64)):
        assert mark_of(parameter, is_hashed=True) == mark_of(parameter, is_hashed=True)
