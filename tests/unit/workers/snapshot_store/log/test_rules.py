"""An optimizer that its task declares elementwise is made again from data: the same class, defaults and groups."""

import json
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer, RMSprop

from shoal_workers.snapshot_store.log.records import Commit, head_of
from shoal_workers.snapshot_store.log.rules import class_of, describe, keep_tensors, rebuild, rule_of

STEPS = 5
CASES: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (SGD, {}),
    (RMSprop, {"centered": True}),
    (Adagrad, {"lr_decay": 0.01}),
    (AdamW, {"amsgrad": True, "betas": (0.8, 0.95)}),
]


def _gradient(shape: torch.Size, step: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize(("kind", "settings"), CASES, ids=lambda one: getattr(one, "__name__", str(one)))
@pytest.mark.parametrize("has_counters", [True, False])
def test_the_rule_of_a_log_updates_a_part_bit_for_bit(
    kind: type[Optimizer], settings: dict[str, Any], has_counters: bool
) -> None:
    """From the state after the first step on. Only one rank's part has the counters."""
    own = nn.Parameter(torch.linspace(-1, 1, 35).view(7, 5))
    optimizer = kind([{"params": [own]}], lr=0.1, **settings)  # type: ignore[call-arg]
    own.grad = _gradient(own.shape, 0)
    optimizer.step()
    state = optimizer.state[own]
    part = {"model.w": own.detach().clone(), **{f"optim.w.{key}": value.clone() for key, value in state.items()}}
    counters = [(key, value) for key, value in state.items() if value.shape != own.shape]
    if not has_counters:
        for key, _ in counters:
            part.pop(f"optim.w.{key}")
    logged = describe(optimizer).model_copy(
        update={"counters": tuple((key, str(value.dtype).removeprefix("torch.")) for key, value in counters)}
    )
    rule = rule_of(head_of([], [("w", 0, own.shape)], commit_room=9, optimizer=logged), part.__getitem__, part)
    for step in range(1, STEPS):
        lr = 0.1 / step
        commit = Commit(
            step=step,
            previous=step - 1,
            is_bf16=False,
            unscale=1,
            clip=1,
            lrs=(lr,),
            counts=(step,),
            counters=tuple((key, (float(state[key]),)) for key, _ in counters),
            changed=(),
            extra_bytes=0,
        )
        rule.apply(commit, {0: _gradient(own.shape, step)})
        optimizer.param_groups[0]["lr"] = lr
        own.grad = _gradient(own.shape, step)
        optimizer.step()
    assert torch.equal(part["model.w"], own)
    for name in part:
        if name.startswith("optim."):
            assert torch.equal(part[name], state[name.rpartition(".")[2]]), name


def test_an_optimizer_of_the_same_settings_is_built_from_its_description() -> None:
    first = SGD([{"params": [nn.Parameter(torch.ones(2))], "momentum": 0.5}], lr=0.1, weight_decay=0.2)
    logged = describe(first)
    assert class_of(logged.path) is SGD
    groups = [{**json.loads(logged.groups[0]), "lr": 0.0, "params": [nn.Parameter(torch.ones(2))]}]
    again = rebuild(SGD, groups, json.loads(logged.defaults))
    for key in ("momentum", "weight_decay", "nesterov"):
        assert again.param_groups[0][key] == first.param_groups[0][key]


def test_what_no_other_process_can_make_is_refused_with_the_reason() -> None:
    class Local(SGD):
        pass

    parameter = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match="not defined at the top of a module"):
        describe(Local([parameter], lr=0.1))
    with pytest.raises(ValueError, match="not plain JSON"):
        describe(SGD([parameter], lr=torch.tensor(0.1)))
    for path in ("no_such_module:Thing", "torch.optim:NoSuchThing"):
        with pytest.raises(ValueError, match="cannot be imported here"):
            class_of(path)
    with pytest.raises(ValueError, match=r"not a torch.optim.Optimizer"):
        class_of("subprocess:Popen")


def test_a_tensor_that_an_optimizer_replaces_in_its_state_stays_where_it_was() -> None:
    kept, new = torch.zeros(3), torch.ones(3)
    state: dict[str, object] = {"average": new}
    keep_tensors(state, {"average": kept})
    assert state["average"] is kept and torch.equal(kept, new)
