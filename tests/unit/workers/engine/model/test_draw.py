"""engine/model/draw.py: each element's initial value is a function of seed, name and index."""

from __future__ import annotations

import hashlib
import math
from statistics import NormalDist

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal_workers.engine.model.draw import Box, Constant, Distribution, Normal, Uniform, _log, _normal_quantile, draw


def _drawn(
    distribution: Distribution, box: Box, *, seed: int = 1, name: str = "weight", dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    out = torch.full(box.sizes, math.nan, dtype=dtype)
    draw(distribution, seed, name, box, out)
    return out


def _whole(*shape: int) -> Box:
    return Box(shape, (0,) * len(shape), shape)


@st.composite
def _boxes(draw: st.DrawFn) -> Box:
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    ends = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape]
    return Box(tuple(shape), tuple(low for low, _ in ends), tuple(high - low for low, high in ends))


@given(box=_boxes(), distribution=st.sampled_from([Normal(0.1, 2.0), Uniform(-1.0, 3.0), Constant(0.5)]))
@settings(deadline=None, max_examples=200)
def test_a_part_has_the_bits_of_the_whole(box: Box, distribution: Distribution) -> None:
    whole = _drawn(distribution, _whole(*box.shape))
    part = whole[tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))]
    assert torch.equal(_drawn(distribution, box), part)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_part_of_many_chunks_has_the_bits_of_the_whole(dtype: torch.dtype) -> None:
    whole = _drawn(Normal(0, 0.02), _whole(301, 1001), dtype=dtype)
    for rows, columns in (
        (slice(7, 150), slice(0, 1001)),
        (slice(0, 301), slice(333, 667)),
        (slice(300, 301), slice(5)),
    ):
        offsets = (rows.start, columns.start or 0)
        box = Box((301, 1001), offsets, (rows.stop - offsets[0], columns.stop - offsets[1]))
        assert torch.equal(_drawn(Normal(0, 0.02), box, dtype=dtype), whole[rows, columns])


def test_a_tensor_without_dims_has_one_element() -> None:
    assert torch.equal(_drawn(Normal(0, 1), Box((), (), ())), _drawn(Normal(0, 1), _whole(5))[0])


def test_seed_and_name_select_the_stream() -> None:
    values = _drawn(Normal(0, 1), _whole(100))
    assert torch.equal(_drawn(Normal(0, 1), _whole(100)), values)
    for other in (_drawn(Normal(0, 1), _whole(100), seed=2), _drawn(Normal(0, 1), _whole(100), name="bias")):
        assert not (other == values).any()


def test_the_values_of_a_release_are_those_of_the_last() -> None:
    """A change to them changes every new model: it belongs into the changelog."""
    octets = _drawn(Normal(0, 0.02), _whole(1000, 129)).numpy().tobytes()
    octets += _drawn(Uniform(-0.1, 0.1), _whole(77)).numpy().tobytes()
    assert hashlib.sha256(octets).hexdigest()[:16] == "0af088d0b3d81e9b"


def test_values_are_distributed_as_asked() -> None:
    normal = _drawn(Normal(1.0, 3.0), _whole(1_000_000), dtype=torch.float64)
    assert normal.mean().item() == pytest.approx(1.0, abs=0.015)
    assert normal.std().item() == pytest.approx(3.0, rel=0.005)
    exact = NormalDist(1.0, 3.0)
    for threshold in (-8.0, -2.0, 0.0, 1.0, 4.0, 10.0):
        share = (normal < threshold).double().mean().item()
        assert share == pytest.approx(exact.cdf(threshold), abs=0.0025)
    uniform = _drawn(Uniform(-2.0, 6.0), _whole(1_000_000), dtype=torch.float64)
    counts = torch.histc(uniform, 16, -2.0, 6.0)
    assert counts.sum() == 1_000_000 and (counts - 62_500).abs().max() < 1_250


def test_neighbouring_elements_and_streams_are_not_correlated() -> None:
    one = _drawn(Normal(0, 1), _whole(200_000), dtype=torch.float64)
    other = _drawn(Normal(0, 1), _whole(200_000), name="other", dtype=torch.float64)
    pairs = [(one[:-distance], one[distance:]) for distance in (1, 2, 3, 4, 8, 1024)] + [(one, other)]
    assert max(abs((a * b).mean().item()) for a, b in pairs) < 0.01


def test_the_quantile_is_that_of_the_normal_distribution() -> None:
    probabilities = np.concatenate([np.logspace(-16, -1, 2_001), np.linspace(0.01, 0.5, 2_001)])
    exact = np.array([NormalDist().inv_cdf(p) for p in probabilities])
    np.testing.assert_allclose(_normal_quantile(probabilities - 0.5)[2_001:], exact[2_001:], rtol=1e-14, atol=1e-15)
    small = probabilities[probabilities > 1e-9]
    np.testing.assert_allclose(_normal_quantile(small - 0.5), [NormalDist().inv_cdf(p) for p in small], rtol=1e-7)
    assert np.array_equal(_normal_quantile(0.5 - small), -_normal_quantile(small - 0.5))


def test_the_logarithm_is_exact_to_the_last_bits() -> None:
    values = np.concatenate([np.logspace(-16, 0, 10_001), np.linspace(1e-3, 1.0, 10_001)])
    np.testing.assert_allclose(_log(values), np.log(values), rtol=5e-16, atol=1e-16)
