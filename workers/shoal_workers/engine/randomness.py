"""Seeds every generator that a task may draw from. The stream of a micro-batch is a function of its seed alone.

Called once per micro-batch, by the passes. It does not use `torch.manual_seed`, which formats a stack trace and queues
a call for every kind of device that is not in use: that takes longer than a small forward pass, and is never freed.

A pipeline goes through one stream on several ranks: each continues with the state that the one before has left.
"""

from __future__ import annotations

import pickle
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

_PYTHON_WORDS = 625
_NUMPY_WORDS = 624


def seed_everything(seed: int) -> None:
    """torch on the CPU and on the current GPU if one is in use, Python's `random`, and NumPy's legacy generator."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(seed)
    random.seed(seed)
    # NumPy takes at most 32 bits.
    np.random.seed(seed & 0xFFFFFFFF)


def generator_states() -> Tensor:
    """The state of all of these, as bytes: uint8 on the CPU. Its length is the same in every process of a group."""
    version, words, python_gauss = random.getstate()
    assert version == 3 and len(words) == _PYTHON_WORDS
    state: Any = np.random.get_state(legacy=False)
    words_of_numpy: Any = state["state"]
    numbers = [state["has_gauss"], state["gauss"], python_gauss is not None, python_gauss or 0.0]
    parts = [
        torch.default_generator.get_state(),
        _as_bytes(np.array(words, np.uint32)),
        _as_bytes(np.append(words_of_numpy["key"], words_of_numpy["pos"]).astype(np.uint32)),
        _as_bytes(np.array(numbers, np.float64)),
    ]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        parts.append(torch.cuda.get_rng_state())
    return torch.cat(parts)


def set_generator_states(states: Tensor) -> None:
    """Sets the states as `generator_states` returned them, in this process or another one."""
    size = torch.default_generator.get_state().numel()
    lengths = [size, 4 * _PYTHON_WORDS, 4 * (_NUMPY_WORDS + 1), 4 * 8]
    of_torch, of_python, of_numpy, gauss, of_cuda = torch.split(states, [*lengths, states.numel() - sum(lengths)])
    torch.default_generator.set_state(of_torch.clone())
    has_gauss, numpy_gauss, has_python_gauss, python_gauss = _numbers(gauss, np.float64)
    words = _numbers(of_python, np.uint32)
    random.setstate((3, tuple(words), python_gauss if has_python_gauss else None))
    *key, position = _numbers(of_numpy, np.uint32)
    np.random.set_state(("MT19937", np.array(key, np.uint32), position, int(has_gauss), numpy_gauss))
    if of_cuda.numel():
        torch.cuda.set_rng_state(of_cuda.clone())


def is_generator(value: object) -> bool:
    """Return whether it is a generator of one's own, beside those that `seed_everything` seeds."""
    return isinstance(value, (torch.Generator, np.random.Generator, np.random.RandomState, random.Random))


def state_of_generator(generator: Any) -> bytes:
    """Return its state; equal if it draws the same numbers next."""
    if isinstance(generator, torch.Generator):
        return bytes(generator.get_state().numpy().tobytes())
    if isinstance(generator, np.random.Generator):
        return pickle.dumps(generator.bit_generator.state)
    is_python = isinstance(generator, random.Random)
    return pickle.dumps(generator.getstate() if is_python else generator.get_state(legacy=False))


def set_generator(generator: Any, state: bytes) -> None:
    """`state`: of `state_of_generator`, of one of the same kind in this process."""
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = pickle.loads(state)
    else:
        set_state = generator.setstate if isinstance(generator, random.Random) else generator.set_state
        set_state(pickle.loads(state))


def _as_bytes(values: Any) -> Tensor:
    return torch.frombuffer(bytearray(values.tobytes()), dtype=torch.uint8)


def _numbers(values: Tensor, kind: Any) -> list[Any]:
    numbers: list[Any] = np.frombuffer(values.numpy().tobytes(), kind).tolist()
    return numbers
