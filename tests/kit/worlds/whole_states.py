"""The state of a whole group, assembled from the parts that its ranks have dumped, to be compared bit for bit."""

from typing import Any

import numpy as np


def whole(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The ranks' parts assembled. Parts that several ranks have must be equal bit for bit, and no part may be
    missing."""
    found: dict[str, Any] = {}
    is_there: dict[str, Any] = {}
    for part in parts:
        for name, (shape, offsets, values) in part.items():
            if name not in found:
                found[name] = np.zeros(shape or (1,), values.dtype)
                is_there[name] = np.zeros(shape or (1,), bool)
            box = tuple(slice(at, at + size) for at, size in zip(offsets, values.shape, strict=True)) or slice(None)
            known = is_there[name][box]
            assert np.array_equal(found[name][box][known], values.reshape(known.shape)[known]), name
            found[name][box] = values
            is_there[name][box] = True
    for name, mask in is_there.items():
        assert mask.all(), name
    return found


def assert_same_bits(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert before.keys() == after.keys()
    assert any(name.startswith("optim.") for name in before)
    differing = [name for name, values in before.items() if values.tobytes() != after[name].tobytes()]
    assert differing == []
