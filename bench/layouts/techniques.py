"""How much each technique reduces a rank's peak memory: measured, and as the planner predicts it.

Without a GPU, offloaded tensors share the memory of all other tensors. The memory that a GPU would need is then the
peak minus what the policy keeps on the host: parameters and optimizer state (measured between two steps) and gradients
(as large as the parameters).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from layouts.cases import OFFLOAD, TECHNIQUES
from layouts.reality import MEMORY_WITHIN, Compared, compare
from shoal_service.planner.gpus import CPU

_HOST_SHARE = 4 / 3
"""Ratio of parameters, two moments and gradients to parameters and two moments."""


def measure(folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Measures all techniques. It passes if every technique reduces the peak and every prediction is within the
    planner's limit."""
    cases = [fixed for _, fixed_list in TECHNIQUES for fixed in fixed_list] + list(OFFLOAD)
    found = compare(cases, CPU, folder, say, timed_steps=0)
    rows: dict[str, list[Compared]] = {}
    index = 0
    for name, fixed_list in TECHNIQUES:
        rows[name] = found[index : index + len(fixed_list)]
        index += len(fixed_list)
    rows["offload"] = [found[index], _on_device(found[index + 1])]
    return {
        "techniques": {name: [asdict(one) for one in ones] for name, ones in rows.items()},
        "passed": all(_is_reduced(ones) for ones in rows.values()),
    }


def _on_device(whole: Compared) -> Compared:
    kept = round(whole.measured_state_bytes * _HOST_SHARE)
    return replace(whole, measured_bytes=whole.measured_bytes - kept)


def _is_reduced(ones: list[Compared]) -> bool:
    falls = all(a.measured_bytes > b.measured_bytes for a, b in pairwise(ones))
    return falls and all(abs(one.memory_error) <= MEMORY_WITHIN for one in ones)
