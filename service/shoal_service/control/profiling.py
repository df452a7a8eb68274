"""Makes a hardware profile of this machine from what `python -m shoal_workers.profile` measures in its own processes.

What cannot be measured on one machine (links to others) is taken from the most similar built-in profile. Called by
`shoal profile`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from shoal_service.core.hardware_profile import DeviceKind, Link
from shoal_service.core.quantities import count_text
from shoal_service.planner import HardwareProfile
from shoal_service.planner.gpus import CPU, DEFAULT_GPU, PROFILES
from shoal_workers.contract.spec import Precision

_TIMEOUT_S = 600


class ProfilingError(RuntimeError):
    """The measurement failed; the message is the end of its output."""

    code = "profiling_failed"


def measure_profile(
    *, name: str | None, max_processes: int, seconds: float, report: Callable[[str], None]
) -> HardwareProfile:
    """Takes about a minute. Raises ProfilingError."""
    report(f"measuring groups of up to {count_text(max_processes, 'process')}; keep the machine otherwise idle")
    command = [sys.executable, "-m", "shoal_workers.profile", "--processes", str(max_processes)]
    try:
        done = subprocess.run(
            [*command, "--seconds", str(seconds)], capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise ProfilingError(f"the measurement took more than {_TIMEOUT_S} s. Use fewer --processes.") from None
    if done.returncode:
        raise ProfilingError("\n".join(done.stderr.strip().splitlines()[-3:]) or f"exit code {done.returncode}")
    return profile_of(json.loads(done.stdout.splitlines()[-1]), name)


def profile_of(measured: dict[str, Any], name: str | None = None) -> HardwareProfile:
    """Pure: measurements of `shoal_workers.profile` -> a profile."""
    is_gpu = measured["device"] == "cuda"
    like = _most_like(measured["name"]) if is_gpu else CPU
    matmul = {Precision(precision): float(rate) for precision, rate in measured["matmul_flops"].items()}
    groups = {int(size): group for size, group in measured["groups"].items()}
    inside = like.inside
    if groups:
        inside = Link(
            bandwidth=groups[_uncrowded(groups, measured)]["bytes_per_s"],
            latency_s={size: group["latency_s"] for size, group in groups.items()},
        )
    # the data sheet's peak if there is one: MFU is relative to it
    peak = dict(like.peak_flops) if is_gpu else matmul
    base = Precision.BF16 if is_gpu else Precision.FP32
    return like.model_copy(
        update={
            "name": name or (f"{like.name}-measured" if is_gpu else "cpu"),
            "peak_flops": peak,
            "matmul_efficiency": min(1.0, matmul[base] / peak[base]),
            "attention_efficiency": min(1.0, measured["attention_flops"] / peak[base]),
            "half_width": measured["half_width"],
            "memory_bytes": int(measured["memory_bytes"]) if is_gpu else _share(measured),
            "memory_bandwidth": measured["elementwise_bytes_per_s"],
            "host_bandwidth": measured["host_bytes_per_s"],
            "inside": inside,
            "between": like.between if is_gpu else inside,
            "ranks_per_node": max(1, int(measured["num_devices"])) if is_gpu else like.ranks_per_node,
            "processors_per_node": 0 if is_gpu else int(measured["num_devices"]),
            "measured": True,
        }
    )


def _uncrowded(groups: dict[int, Any], measured: dict[str, Any]) -> int:
    """The largest group with a processor for each rank: the planner itself accounts for crowded groups."""
    return max((size for size in groups if size <= int(measured["num_devices"])), default=min(groups))


def _share(measured: dict[str, Any]) -> int:
    """Memory of a CPU rank if one rank runs per core."""
    return int(measured["memory_bytes"]) // max(1, int(measured["num_devices"]))


def _most_like(device_name: str) -> HardwareProfile:
    """The built-in GPU whose name is a word of the device's name: "NVIDIA H200" -> h200."""
    words = device_name.lower().replace("_", "-").replace("-", " ").split()
    fitting = [p for p in PROFILES.values() if p.kind is DeviceKind.GPU and p.name.split("-")[0] in words]
    if len(fitting) > 1:  # one GPU in sizes: a100-40gb, a100-80gb
        fitting = [p for p in fitting if p.name.split("-")[-1] in words] or fitting
    return fitting[0] if fitting else PROFILES[DEFAULT_GPU]
