"""Initial values of a parameter as a function of seed, name and element: any part of it can be drawn on its own.

    element i of a parameter      word i of the Philox4x64-10 stream (Salmon et al. 2011) whose key is a digest of the
                                  seed and the parameter's name; i counts the whole parameter, row by row
    uniform                       the upper 53 bits of the word
    normal                        their inverse distribution function, by Wichura's algorithm AS 241 (1988)

Equal bits on every machine and for every part: only operations that IEEE 754 rounds exactly are used (+, -, x, / and
square roots), in fp64 and in a fixed order, and one rounding to the parameter's dtype. A library's logarithm may differ
in the last bit between vector widths. NumPy guarantees the stream of its Philox. Called by `initial_weights`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]
_CHUNK = 1 << 15
"""Elements at a time: what is computed in between stays in the cache."""
_WORDS = 4
"""Words that one Philox counter gives."""


@dataclass(frozen=True, slots=True)
class Normal:
    mean: float
    std: float


@dataclass(frozen=True, slots=True)
class Uniform:
    """Uniform over [`low`, `high`); rounding may give `high` itself."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Constant:
    value: float


Distribution = Normal | Uniform | Constant


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a parameter of `shape`."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@torch.no_grad()
def draw(distribution: Distribution, seed: int, name: str, box: Box, out: Tensor) -> None:
    """Fill `out`, which holds the values of `box` of the parameter `name`, in place; contiguous, on any device."""
    if isinstance(distribution, Constant):
        out.fill_(distribution.value)
        return
    flat, stream = out.view(-1), _Stream(seed, name)
    done = 0
    for runs in _batches(_runs(box)):
        words = np.concatenate([stream.words(first, count) for first, count in runs])
        values = torch.from_numpy(_values(distribution, words))
        flat[done : done + len(values)].copy_(values)
        done += len(values)
    assert done == flat.numel(), f"{name}: the box has {done} elements, its tensor {flat.numel()}"


class _Stream:
    """The words of one parameter."""

    def __init__(self, seed: int, name: str) -> None:
        digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=16).digest()
        self._generator = np.random.Philox(key=int.from_bytes(digest, "little"))
        self._block = 0

    def words(self, first: int, count: int) -> NDArray[np.uint64]:
        """Words first, first + 1, ... of the stream."""
        block, end = first // _WORDS, -(-(first + count) // _WORDS)
        self._generator.advance(block - self._block)
        self._block = end
        words: NDArray[np.uint64] = self._generator.random_raw((end - block) * _WORDS)
        return words[first - block * _WORDS :][:count]


def _runs(box: Box) -> Iterator[tuple[int, int]]:
    """(first, count) of the elements of the box, in its order, that follow one another in the parameter."""
    whole = len(box.shape)
    while whole and box.sizes[whole - 1] == box.shape[whole - 1]:
        whole -= 1  # the dims from here on are whole
    inner = math.prod(box.sizes[max(whole - 1, 0) :])
    strides = [math.prod(box.shape[dim + 1 :]) for dim in range(len(box.shape))]
    first = sum(offset * stride for offset, stride in zip(box.offsets, strides, strict=True))
    outer = box.sizes[: max(whole - 1, 0)]
    if inner == 0:
        return
    for index in np.ndindex(*outer):
        yield first + sum(at * stride for at, stride in zip(index, strides, strict=False)), inner


def _batches(runs: Iterator[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Runs of together one chunk at most; longer ones are split."""
    batch: list[tuple[int, int]] = []
    size = 0
    for first, count in runs:
        for begin in range(first, first + count, _CHUNK):
            length = min(_CHUNK, first + count - begin)
            if size + length > _CHUNK:
                yield batch
                batch, size = [], 0
            batch.append((begin, length))
            size += length
    if batch:
        yield batch


def _values(distribution: Normal | Uniform, words: NDArray[np.uint64]) -> Floats:
    if isinstance(distribution, Uniform):
        unit = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
        return distribution.low + unit * (distribution.high - distribution.low)
    centred = ((words >> np.uint64(12)).astype(np.float64) - (2.0**51 - 0.5)) * 2.0**-52  # in (-1/2, 1/2), exact
    return distribution.mean + _normal_quantile(centred) * distribution.std


def _normal_quantile(q: Floats) -> Floats:
    """The x that a standard normal variable exceeds with probability 1/2 - q; relative error about 1e-16."""
    r = 0.180625 - q * q
    is_tail = r < 0  # |q| > 0.425
    values: Floats = _polynomial(r, _CENTRE[0]) * q / _polynomial(r, _CENTRE[1])
    in_tail = q[is_tail]
    depth = np.sqrt(-_log(0.5 - np.abs(in_tail)))
    near, far = depth - 1.6, depth - 5.0
    tail = _polynomial(near, _NEAR[0]) / _polynomial(near, _NEAR[1])
    is_far = far > 0
    tail[is_far] = _polynomial(far[is_far], _FAR[0]) / _polynomial(far[is_far], _FAR[1])
    values[is_tail] = np.where(in_tail < 0, -tail, tail)
    return values


def _log(x: Floats) -> Floats:
    """ln x of positive normal numbers: 2 artanh((m - 1) / (m + 1)) of the mantissa m, near 1, and the exponent."""
    mantissa, exponent = np.frexp(x)
    is_small = mantissa < math.sqrt(0.5)
    mantissa = np.where(is_small, 2 * mantissa, mantissa)
    s = (mantissa - 1) / (mantissa + 1)
    series: Floats = _polynomial(s * s, _ARTANH) * (2 * s)
    return (exponent - is_small) * math.log(2) + series


def _polynomial(x: Floats, coefficients: Sequence[float]) -> Floats:
    """Horner's scheme, the highest power first. Each product and each sum is rounded: nothing is fused."""
    total = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        total *= x
        total += coefficient
    return total


_ARTANH = [1 / (2 * k + 1) for k in range(11, -1, -1)]
_CENTRE = (
    [
        *(2509.0809287301226727, 33430.575583588128105, 67265.770927008700853, 45921.953931549871457),
        *(13731.693765509461125, 1971.5909503065514427, 133.14166789178437745, 3.3871328727963666080),
    ],
    [
        *(5226.4952788528545610, 28729.085735721942674, 39307.895800092710610, 21213.794301586595867),
        *(5394.1960214247511077, 687.18700749205790830, 42.313330701600911252, 1.0),
    ],
)
"""Numerator and denominator of the rational approximations of AS 241."""
_NEAR = (
    [
        *(7.7454501427834140764e-4, 0.0227238449892691845833, 0.241780725177450611770, 1.27045825245236838258),
        *(3.64784832476320460504, 5.76949722146069140550, 4.63033784615654529590, 1.42343711074968357734),
    ],
    [
        *(1.05075007164441684324e-9, 5.475938084995344946e-4, 0.0151986665636164571966, 0.148103976427480074590),
        *(0.689767334985100004550, 1.67638483018380384940, 2.05319162663775882187, 1.0),
    ],
)
_FAR = (
    [
        *(2.01033439929228813265e-7, 2.71155556874348757815e-5, 0.00124266094738807843860, 0.0265321895265761230930),
        *(0.296560571828504891230, 1.78482653991729133580, 5.46378491116411436990, 6.65790464350110377720),
    ],
    [
        *(2.04426310338993978564e-15, 1.42151175831644588870e-7, 1.84631831751005468180e-5, 7.86869131145613259100e-4),
        *(0.0148753612908506148525, 0.136929880922735805310, 0.599832206555887937690, 1.0),
    ],
)
