"""The optimizer that a spec names, and which settings of its groups are state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.swa_utils import AveragedModel

from shoal_workers.contract.layout import plain
from shoal_workers.contract.optimizers import OptimizerSpec
from shoal_workers.engine.parallel.assembly import Assembly
from shoal_workers.engine.step.update import Update, adamw, apply_changes, find_changes, is_plain, select_plain_settings


def test_only_what_a_run_has_changed_is_saved_with_the_value_that_was_built() -> None:
    built = {"weight_decay": 0.1, "betas": [0.9, 0.95], "k": 0}
    assert find_changes(built, dict(built)) == {}
    assert find_changes(built, built | {"k": 7, "seen": True}) == {"k": [0, 7], "seen": [True]}


@pytest.mark.parametrize(
    ("built", "changed", "expected"),
    [
        ({"decay": 0.1}, {}, {"decay": 0.1}),
        ({"decay": 0.2}, {}, {"decay": 0.2}),
        ({"decay": 0.1}, {"decay": [0.1, 0.5]}, {"decay": 0.5}),
        ({"decay": 0.2}, {"decay": [0.1, 0.5]}, {"decay": 0.2}),
        ({"decay": 0.1}, {"seen": [True]}, {"decay": 0.1, "seen": True}),
        ({"decay": 0.1, "seen": False}, {"seen": [True]}, {"decay": 0.1, "seen": False}),
        ({}, {"decay": [0.1, 0.5]}, {}),
    ],
    ids=["plain", "built otherwise", "changed by the run", "both", "added", "added and built now", "no longer built"],
)
def test_what_is_built_now_acts_and_what_the_run_has_changed_is_kept(
    built: dict[str, Any], changed: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert apply_changes(built, changed) == expected


def test_rates_implementations_and_tensors_are_never_saved() -> None:
    group = {"params": [1], "lr": 0.1, "initial_lr": 0.2, "fused": True, "foreach": None, "scale": object(), "k": 1}
    assert select_plain_settings(group) == {"initial_lr": 0.2, "k": 1}
    assert is_plain((0.9, 0.99)) and not is_plain([object()])


def _is_fused(settings: dict[str, Any], *, deterministic: bool = False) -> bool:
    groups = [{"params": [nn.Parameter(torch.ones(2))]}]
    optimizer = adamw(groups, OptimizerSpec.model_validate(settings), deterministic=deterministic)
    return bool(optimizer.param_groups[0]["fused"])


@pytest.mark.parametrize("deterministic", [False, True])
def test_auto_is_not_fused_for_parameters_on_the_cpu(deterministic: bool) -> None:
    assert not _is_fused({}, deterministic=deterministic)


def test_an_explicit_fused_setting_is_used() -> None:
    assert _is_fused({"fused": True})
    assert not _is_fused({"fused": False})


@pytest.mark.parametrize("columns", [5, 3_000_000], ids=["all together", "one after the other"])
def test_the_bits_do_not_depend_on_whether_parameters_are_updated_together(columns: int) -> None:
    """As of all workers of a job, which have parts of different sizes."""
    settings = OptimizerSpec(lr=0.02)
    start = torch.randn(3, columns, generator=torch.Generator().manual_seed(1))
    pieces, rows = [nn.Parameter(start.clone())], [nn.Parameter(row.clone()) for row in start]
    optimizers = [adamw([{"params": parameters, "weight_decay": 0.1}], settings) for parameters in (pieces, rows)]
    optimizers[1].param_groups[0]["foreach"] = True
    for step in range(3):
        gradient = torch.randn(3, columns, generator=torch.Generator().manual_seed(100 + step))
        pieces[0].grad = gradient
        for row, part in zip(rows, gradient, strict=True):
            row.grad = part
        for optimizer in optimizers:
            optimizer.step()
    assert optimizers[0].param_groups[0]["foreach"] is (columns == 5)
    assert torch.equal(pieces[0], torch.stack(list(rows)))


class _Keeping(SGD):
    """Calls `keep` of its test after each step."""

    def __init__(self, model: nn.Module, keep: Callable[[Any], object], **attributes: Any) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self.model, self.keep = model, keep
        vars(self).update(attributes)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.keep(self)


def _hooked(model: nn.Module) -> Optimizer:
    optimizer, counts = SGD(model.parameters(), lr=0.1), [0]

    def count(*_: object) -> None:
        counts[0] += 1

    optimizer.register_step_post_hook(count)
    return optimizer


def _averaging(model: nn.Module) -> Optimizer:
    optimizer, average = SGD(model.parameters(), lr=0.1), AveragedModel(model)
    optimizer.register_step_post_hook(lambda *_: average.update_parameters(model))
    return optimizer


def _with_another_group(optimizer: Any) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def _in_the_group(optimizer: Any) -> None:
    optimizer.param_groups[0]["distance"] = torch.ones(())


KEEPING: dict[str, Callable[[nn.Module], Optimizer]] = {
    "a dict of tensors": lambda model: _Keeping(model, lambda one: one.slow.update(w=torch.ones(2)), slow={}),
    "a tensor in a list": lambda model: _Keeping(model, lambda one: one.slow[0].add_(1), slow=[torch.ones(2)]),
    "a generator": lambda model: _Keeping(model, lambda one: torch.rand(2, generator=one.g), g=torch.Generator()),
    "an inner optimizer": lambda model: _Keeping(
        model, lambda one: one.inner.state.update(n=1), inner=SGD(model.parameters(), lr=0.1)
    ),
    "a key of the state that is no parameter": lambda model: _Keeping(
        model, lambda one: one.state.setdefault("all", {}).update(n=len(one.state))
    ),
    "a list in the state": lambda model: _Keeping(
        model, lambda one: one.state[one.model.weight].setdefault("past", []).append(1)
    ),
    "a tensor in a group": lambda model: _Keeping(model, _in_the_group),
    "a closure of a hook": _hooked,
    "an average in a hook": _averaging,
    "a new group": lambda model: _Keeping(model, _with_another_group),
}


def _step(optimizer: Optimizer, model: nn.Module) -> None:
    model(torch.ones(1, 2)).sum().backward()
    Update(Assembly(plain(1), (model,)), optimizer, ()).step(1.0)


def test_what_a_step_keeps_where_no_checkpoint_has_it_is_refused() -> None:
    trained = []
    for kind, make in KEEPING.items():
        model = nn.Linear(2, 2)
        try:
            _step(make(model), model)
            trained.append(kind)
        except ValueError as error:
            assert "no checkpoint holds" in str(error), kind
    assert trained == []


def test_numbers_of_the_optimizer_and_of_its_groups_and_constants_are_kept() -> None:
    def count(optimizer: Any) -> None:
        optimizer.num, optimizer.best = optimizer.num + 1, float("inf")
        optimizer.param_groups[0]["num"] = optimizer.num
        optimizer.state[optimizer.model.weight]["mean"] = torch.ones(2)

    model = nn.Linear(2, 2)
    _step(_Keeping(model, count, num=0, best=0.0, weights=[torch.ones(2)]), model)


def test_a_rate_that_is_changed_outside_of_the_step_is_refused() -> None:
    model = nn.Linear(2, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    update = Update(Assembly(plain(1), (model,)), optimizer, ())
    update.step(1.0)
    optimizer.param_groups[0]["lr"] = 0.05
    with pytest.raises(ValueError, match=r"from 0\.1 to 0\.05"):
        update.step(1.0)
