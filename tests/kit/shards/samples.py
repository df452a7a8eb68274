"""The samples that are in `files/`, as they were given to the libraries. Read by the tests and by `write.py`."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import torch

FILES = Path(__file__).parent / "files"
MDS_COLUMNS = {
    "number": "int",
    "text": "str",
    "raw": "bytes",
    "tree": "json",
    "array": "ndarray",
    "typed": "ndarray:float32",
    "fixed": "ndarray:int16:2,3",
    "u8": "uint8",
    "i32": "int32",
    "f16": "float16",
    "f64": "float64",
    "huge": "str_int",
    "exact": "str_decimal",
    "picture": "jpeg",
}
MDS_COMPRESSIONS = {"plain": None, "zstd": "zstd", "gz": "gz:6", "br": "br"}
LITDATA_LEVELS = ("chunk", "batch", "sample")


def mds() -> list[dict[str, Any]]:
    return [
        {
            "number": n - 2,
            "text": "ä" * n,
            "raw": bytes(range(n)),
            "tree": {"x": [n, None]},
            "array": np.arange(6, dtype=np.int64).reshape(2, 3) + n,
            "typed": np.full((n + 1, 2), n / 4, np.float32),
            "fixed": np.full((2, 3), n, np.int16),
            "u8": np.uint8(n),
            "i32": np.int32(-n),
            "f16": np.float16(n / 2),
            "f64": np.float64(n / 3),
            "huge": 10**30 + n,
            "exact": Decimal("1.50") * n,
            "picture": b"\xff\xd8 as it stands " + bytes([n]),
        }
        for n in range(5)
    ]


def trees() -> list[dict[str, Any]]:
    return [
        {
            "number": n,
            "share": n / 3,
            "text": "ö" * n,
            "raw": bytes(range(n)),
            "flag": n % 2 == 0,
            "line": np.arange(n + 1, dtype=np.int32),
            "table": np.full((2, n + 1), n, np.float16),
            "vector": torch.arange(n + 1, dtype=torch.int16),
            "matrix": torch.full((2, 2), n / 4),
            "empty": torch.zeros(2, 0),
            "nested": {"list": [n, n + 1], "pair": (1.5, "x")},
        }
        for n in range(6)
    ]


def nested() -> list[dict[str, Any]]:
    """Values that LitData writes as one leaf with its own tags."""
    turn = {"role": "user", "score": 0.5, "first": True, "note": None}
    return [
        {
            "number": n,
            "turns": [{**turn, "at": at} for at in range(n + 1)],
            "names": ["a", "bc"][: n % 3],
            "counts": [1, 2, n],
            "shares": [0.5],
            "flags": [True, False],
            "mixed": {"some": [1, "x", None], "deep": {"z": -n}},
        }
        for n in range(5)
    ]


def texts() -> list[dict[str, Any]]:
    """Rows that LitData writes as Arrow."""
    return [{"text": f"row {n}", "label": "ab"[n % 2]} for n in range(5)]


def saved() -> list[dict[str, Any]]:
    """Rows of `datasets`, with features that it stores in its own types."""
    return [
        {
            "text": f"row {n}",
            "label": n % 2,
            "raw": bytes([n]),
            "tokens": list(range(n)),
            "grid": [[float(n)] * 3, [0.0] * 3],
        }
        for n in range(7)
    ]


def tokens() -> list[torch.Tensor]:
    return [torch.arange(n + 3, dtype=torch.int32) for n in range(5)]
