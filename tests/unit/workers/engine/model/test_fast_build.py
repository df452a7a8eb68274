"""engine/model/fast_build.py: models are built without drawing their weights, to be restored or drawn in part."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

from shoal_workers.engine.model.draw import Constant, Distribution, Normal, Uniform
from shoal_workers.engine.model.fast_build import build_for_restore, build_undrawn

LARGE = 4096  # squared, times 4 bytes: 64 MiB


class Rotated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(300, 300)
        self.norm = nn.LayerNorm(300)
        self.register_buffer("angles", torch.outer(torch.arange(200.0), torch.linspace(0, 1, 200)))


class Masked(Rotated):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.rand(300) < 0.5)


def _resident_bytes() -> int:
    """The kernel's own count, which may be some pages behind on a machine with several cores."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10


def _undrawn(build: Callable[[], nn.Module]) -> tuple[nn.Module, Mapping[str, Distribution]]:
    undrawn = build_undrawn(build)
    assert undrawn is not None
    return undrawn


def test_everything_but_the_drawn_weights_is_unchanged() -> None:
    built, usual = build_for_restore(Rotated), Rotated()
    assert {name: (p.shape, p.dtype) for name, p in built.named_parameters()} == {
        name: (p.shape, p.dtype) for name, p in usual.named_parameters()
    }
    assert torch.equal(built.angles, usual.angles)
    assert torch.equal(built.norm.weight, usual.norm.weight)


class _Derived(nn.Module):
    """`derive` makes something from initial weights that no checkpoint holds."""

    def __init__(self, derive: Callable[[nn.Module, nn.Linear], object]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(200, 200)
        self.other = nn.Linear(200, 200)
        derive(self, self.linear)


def _a_buffer(model: nn.Module, linear: nn.Linear) -> None:
    model.register_buffer("kept", linear.weight.detach().clone(), persistent=False)


def _a_buffer_that_is_filled(model: nn.Module, linear: nn.Linear) -> None:
    model.register_buffer("kept", torch.zeros(200, 200))
    model.kept.copy_(linear.weight.detach())


def _a_view(model: nn.Module, linear: nn.Linear) -> None:
    model.kept = linear.weight.detach()


def _views_in_a_list(model: nn.Module, linear: nn.Linear) -> None:
    model.kept = list(linear.weight.data)


def _a_number(model: nn.Module, linear: nn.Linear) -> None:
    model.kept = linear.weight.norm().item()


def _an_element(model: nn.Module, linear: nn.Linear) -> None:
    model.kept = float(linear.weight.data[3, 4])


def _an_array(model: nn.Module, linear: nn.Linear) -> None:
    model.kept = linear.weight.detach().numpy().copy()


def _a_list(model: nn.Module, linear: nn.Linear) -> None:
    model.kept = linear.weight.data.tolist()


def _in_a_list_of_modules(model: nn.Module, linear: nn.Linear) -> None:
    hidden = nn.Linear(200, 200)
    model.held = [hidden]
    object.__setattr__(model, "kept", hidden.weight)


def _of_a_copy(model: nn.Module, linear: nn.Linear) -> None:
    model.kept = copy.deepcopy(linear).weight.data.tolist()


def _after_a_change(model: nn.Module, linear: nn.Linear) -> None:
    nn.init.trunc_normal_(linear.weight)
    model.kept = linear.weight.sum(0)


@pytest.mark.parametrize(
    "derive",
    [
        *(_a_buffer, _a_buffer_that_is_filled, _a_view, _views_in_a_list, _a_number, _an_element, _an_array, _a_list),
        *(_of_a_copy, _after_a_change, _in_a_list_of_modules),
    ],
)
def test_what_is_computed_from_initial_weights_is_as_after_a_start(
    derive: Callable[[nn.Module, nn.Linear], object],
) -> None:
    def build() -> nn.Module:
        return _Derived(derive)

    usual, built = build().kept, build_for_restore(build).kept
    torch.testing.assert_close(built, usual, rtol=0, atol=0)
    assert build_undrawn(build) is None


@pytest.mark.parametrize(
    "derive",
    [
        lambda model, linear: setattr(model, "teacher", copy.deepcopy(linear).requires_grad_(False)),
        lambda model, linear: model.other.load_state_dict(linear.state_dict()),
        lambda model, linear: nn.init.trunc_normal_(linear.weight),
        lambda model, linear: linear.weight.data[0].zero_(),
    ],
)
def test_a_restore_draws_nothing_for_parameters_that_depend_on_parameters(
    derive: Callable[[nn.Module, nn.Linear], object],
) -> None:
    """The checkpoint holds them."""
    num_builds = 0

    def build() -> nn.Module:
        nonlocal num_builds
        num_builds += 1
        return _Derived(derive)

    build_for_restore(build)
    assert num_builds == 1


def test_no_random_numbers_are_drawn_for_parameters() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    build_for_restore(Rotated)
    assert torch.equal(torch.get_rng_state(), before)


def test_other_random_values_are_drawn_as_usual() -> None:
    def build() -> Masked:
        torch.manual_seed(1)
        return Masked()

    usual, built = build(), build_for_restore(build)
    assert torch.equal(built.linear.weight, usual.linear.weight)
    assert torch.equal(built.mask, usual.mask)


def test_parameters_cost_no_memory_until_they_are_written() -> None:
    before = _resident_bytes()
    model = build_for_restore(lambda: nn.Linear(LARGE, LARGE, bias=False))
    whole = model.weight.nbytes
    part = model.weight.detach()[: LARGE // 4].clone()
    assert _resident_bytes() - before < whole / 2
    with torch.no_grad():
        model.weight.fill_(1.0)
    assert _resident_bytes() - before > 0.9 * whole
    assert float(part.sum()) == 0.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_large_empty_tensors_of_any_dtype_are_zero(dtype: torch.dtype) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(300, 400, dtype=dtype), requires_grad=False)

    weight = build_for_restore(Odd).weight
    assert (weight.shape, weight.dtype, weight.is_contiguous()) == ((300, 400), dtype, True)
    assert not weight.any()


def test_the_default_dtype_is_used() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        model = build_for_restore(lambda: nn.Linear(200, 200))
    finally:
        torch.set_default_dtype(torch.float32)
    assert model.weight.dtype == torch.float64


def test_tensors_that_are_not_plain_cpu_memory_are_not_changed() -> None:
    class Elsewhere(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.meta = nn.Parameter(torch.empty(400, 400, device="meta"))
            self.last = nn.Parameter(torch.empty(2, 64, 40, 40, memory_format=torch.channels_last))

    model = build_for_restore(Elsewhere)
    assert model.meta.device.type == "meta"
    assert model.last.is_contiguous(memory_format=torch.channels_last)


def test_a_plain_model_is_built_without_values_and_its_distributions_are_known() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    model, distributions = _undrawn(Rotated)
    assert torch.equal(torch.get_rng_state(), before)
    assert distributions.keys() == {"linear.weight", "linear.bias"}
    for distribution in distributions.values():
        assert isinstance(distribution, Uniform)
        assert (distribution.low, distribution.high) == pytest.approx((-(300**-0.5), 300**-0.5))
    assert torch.equal(model.norm.weight, torch.ones(300))
    assert torch.equal(model.angles, Rotated().angles)


def test_the_last_fill_counts_also_through_data_and_of_a_tied_weight() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Embedding(40, 30)
            self.head = nn.Linear(30, 40, bias=False)
            self.head.weight = self.first.weight
            self.large = nn.Parameter(torch.empty(300, 300))
            self.small = nn.Parameter(torch.empty(3))
            self.head.weight.data.normal_(mean=0.5, std=0.25)
            nn.init.zeros_(self.large)
            nn.init.ones_(self.small)

    model, distributions = _undrawn(Tied)
    assert distributions == {"first.weight": Normal(0.5, 0.25), "large": Constant(0.0)}
    assert torch.equal(model.small, torch.ones(3))


def _truncated(weight: nn.Parameter) -> None:
    nn.init.trunc_normal_(weight, std=0.02)


def _orthogonal(weight: nn.Parameter) -> None:
    nn.init.orthogonal_(weight)


def _in_part(weight: nn.Parameter) -> None:
    nn.init.normal_(weight)
    with torch.no_grad():
        weight[0].fill_(0)


def _scaled(weight: nn.Parameter) -> None:
    nn.init.normal_(weight)
    weight.data.mul_(0.5)


def _copied(weight: nn.Parameter) -> None:
    weight.data.copy_(torch.randn(weight.shape))


def _from_a_generator(weight: nn.Parameter) -> None:
    nn.init.normal_(weight, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("fill", [_truncated, _orthogonal, _in_part, _scaled, _copied, _from_a_generator])
def test_values_that_are_no_distribution_of_the_elements_need_a_full_build(fill: Callable[..., None]) -> None:
    class Unusual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(200, 200)
            fill(self.linear.weight)

    assert build_undrawn(Unusual) is None


def test_other_random_values_make_the_build_a_full_one() -> None:
    assert build_undrawn(Masked) is None


def test_a_model_without_values_costs_no_memory() -> None:
    before = _resident_bytes()
    model, distributions = _undrawn(lambda: nn.Linear(LARGE, LARGE))
    assert set(distributions) == {"weight", "bias"}
    assert _resident_bytes() - before < model.weight.nbytes / 4
