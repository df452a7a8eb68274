"""The log of gradients: its records, which steps can be replayed, and the updates of elementwise optimizers."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer, RMSprop

from shoal_workers.snapshot_store.log.records import (
    START_BYTES,
    Commit,
    CommitBlob,
    decode,
    encode,
    head_of,
    previous_of,
)
from shoal_workers.snapshot_store.log.replay import Link, chain, replayable
from shoal_workers.snapshot_store.log.rules import (
    AdamWGroup,
    ParameterBuffers,
    class_of,
    describe,
    keep_tensors,
    rebuild,
    rule_of,
    update,
)

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


GROUP = AdamWGroup(lr=0.05, beta1=0.9, beta2=0.95, eps=1e-5, weight_decay=0.1)
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128]


def _drawn(dtype: torch.dtype, seed: int) -> Tensor:
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return torch.randn((7, 3), dtype=wide, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("is_double_buffered", [True, False])
def test_mixed_dtypes_are_updated_as_torch_updates_them(is_double_buffered: bool) -> None:
    own = [_drawn(dtype, seed) for seed, dtype in enumerate(DTYPES)]
    parameters = [torch.nn.Parameter(tensor.clone()) for tensor in own]
    optimizer = AdamW(parameters, lr=GROUP.lr, betas=(GROUP.beta1, GROUP.beta2), eps=GROUP.eps, weight_decay=0.1)
    now = [ParameterBuffers(tensor, torch.zeros_like(tensor), torch.zeros_like(tensor)) for tensor in own]
    other = [ParameterBuffers(*(torch.full_like(tensor, 9) for _ in range(3))) for tensor in own]
    for step in range(1, 5):
        gradients = [_drawn(tensor.dtype, 100 * step + index) for index, tensor in enumerate(own)]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
        targets = other if is_double_buffered else now
        update(GROUP, gradients, [float(step)] * len(own), now, targets)
        now, other = targets, now
        for parameter, buffers in zip(parameters, now, strict=True):
            state = optimizer.state[parameter]
            assert torch.equal(parameter.detach(), buffers.parameter), (step, parameter.dtype)
            assert torch.equal(state["exp_avg"], buffers.exp_avg)
            assert torch.equal(state["exp_avg_sq"], buffers.exp_avg_sq)


def _blob() -> CommitBlob:
    commit = Commit(
        step=12,
        previous=10,
        is_bf16=False,
        unscale=1 / 3,
        clip=0.1 + 0.2,
        lrs=(1e-3 / 7, 5e-324),
        counts=(12, 0, 3),
        changed=(("model.running", 4), ("model.empty", 0)),
        extra_bytes=7,
    )
    return CommitBlob(commit, (b"\x00\xff\x01\x02", b""), b'{"a":1}')


def test_a_commit_survives_encoding() -> None:
    data = encode(_blob())
    assert decode(data) == _blob()
    assert previous_of(data[:START_BYTES]) == 10


@pytest.mark.parametrize("cut", [0, 5, START_BYTES, START_BYTES + 9, -1])
def test_a_commit_that_was_cut_off_is_refused(cut: int) -> None:
    with pytest.raises(ValueError, match=r"commit|bytes of values"):
        decode(encode(_blob())[:cut])


def test_the_start_of_a_commit_that_was_cut_off_is_refused() -> None:
    with pytest.raises(ValueError, match="longer"):
        previous_of(b"123")


def _links(*steps: int) -> list[Link]:
    return [Link(step, step - 1) for step in steps]


def test_a_step_is_replayed_from_the_newest_copy_before_it() -> None:
    assert chain({10, 12}, _links(11, 12, 13, 14), 14) == (12, tuple(_links(13, 14)))
    assert chain({10, 16}, _links(11, 12, 13, 14), 12) == (10, tuple(_links(11, 12)))


def test_a_copy_needs_no_entries() -> None:
    assert chain({10}, [], 10) == (10, ())


def test_a_missing_entry_ends_what_can_be_replayed() -> None:
    links = _links(11, 13, 14)
    assert chain({10}, links, 13) is None
    assert replayable({10}, links) == {11}


def test_an_older_copy_helps_if_the_newest_does_not_lead_to_the_step() -> None:
    assert chain({8, 10}, [Link(9, 8), Link(11, 9)], 11) == (10, (Link(11, 9),)), "steps 9 and 10 are the same state"
    assert chain({8, 12}, _links(9, 10), 10) == (8, tuple(_links(9, 10)))


def test_a_skipped_step_changes_nothing_and_has_no_entry() -> None:
    links = [Link(11, 10), Link(13, 11), Link(14, 13)]
    assert replayable({10}, links) == {11, 13, 14}
    assert chain({10}, links, 12) is None
    assert chain({12}, links, 14) == (12, (Link(13, 11), Link(14, 13)))


def test_without_a_copy_nothing_can_be_replayed() -> None:
    assert replayable(set(), _links(1, 2)) == set()
    assert chain(set(), _links(1, 2), 2) is None
    assert chain({5}, _links(4), 4) is None


def test_a_step_that_exists_as_a_copy_is_not_listed_again() -> None:
    assert replayable({10, 12}, _links(11, 12, 13)) == {11, 13}
