"""engine/model/fast_build.py: a model that will be restored is built without drawing its weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from shoal_workers.engine.model.fast_build import build_for_restore

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


def test_everything_but_the_drawn_weights_is_unchanged() -> None:
    built, usual = build_for_restore(Rotated), Rotated()
    assert {name: (p.shape, p.dtype) for name, p in built.named_parameters()} == {
        name: (p.shape, p.dtype) for name, p in usual.named_parameters()
    }
    assert torch.equal(built.angles, usual.angles)
    assert torch.equal(built.norm.weight, usual.norm.weight)


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
