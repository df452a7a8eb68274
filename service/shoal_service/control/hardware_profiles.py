"""Hardware profiles of this machine: measured by `shoal profile`, and kept under the state directory as JSON files
`profiles/<name>.json`.

`shoal plan` and the server read them together with the built-in ones; a stored profile replaces the built-in one of the
same name, and the planner prefers a measured one. What `python -m shoal_workers.profile` cannot measure on one machine
(links to others) is taken from the most similar built-in profile.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shoal_service.core.hardware_profile import NARROW_HEAD_SHARE, DeviceKind, Link
from shoal_service.core.quantities import count_text
from shoal_service.planner import HardwareProfile
from shoal_service.planner.gpus import CPU, DEFAULT_GPU, PROFILES
from shoal_service.planner.planning import profile_for
from shoal_workers.contract.spec import JobSpec, Precision

_FOLDER = "profiles"
_TIMEOUT_S = 600
_ATTENTION_LENGTH = 4096
"""Tokens of the sequence that `shoal_workers.profile` measures on a GPU."""


class ProfileError(ValueError):
    """A stored profile cannot be read. The message names the file."""

    code = "invalid_profile"


def load_profiles(state_dir: Path) -> dict[str, HardwareProfile]:
    """All profiles by name; a stored one replaces the built-in one of its name. Raises ProfileError."""
    profiles = dict(PROFILES)
    for path in sorted((state_dir / _FOLDER).glob("*.json")):
        try:
            profile = HardwareProfile.model_validate_json(path.read_text(encoding="utf-8"))
        except (OSError, ValidationError, UnicodeDecodeError) as error:
            first = str(error).splitlines()[0]
            raise ProfileError(
                f"{path} is not a hardware profile ({first}). Remove it, or run `shoal profile`."
            ) from None
        profiles[profile.name] = profile
    return profiles


def measured_profile(profiles: Iterable[HardwareProfile], *, has_gpu: bool) -> HardwareProfile | None:
    """Finds the first profile that was measured on a node of that kind."""
    return next(
        (profile for profile in profiles if profile.measured and (profile.kind is DeviceKind.GPU) == has_gpu), None
    )


def planning_profile(spec: JobSpec, profiles: Iterable[HardwareProfile]) -> HardwareProfile:
    """Chooses the profile with which the layouts of a job are planned."""
    return profile_for(spec, measured_profile(profiles, has_gpu=spec.worker.gpus > 0))


def save_profile(state_dir: Path, profile: HardwareProfile) -> Path:
    """Stores the profile in place of the stored one of the same name. Returns the file."""
    path = state_dir / _FOLDER / f"{profile.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(profile.model_dump_json(indent=2), encoding="utf-8")
    partial.replace(path)
    return path


class ProfilingError(RuntimeError):
    """The measurement failed; the message is the end of its output."""

    code = "profiling_failed"


def measure_profile(
    *, name: str | None, max_processes: int, seconds: float, report: Callable[[str], None]
) -> HardwareProfile:
    """Measures this machine. Takes about a minute. Raises ProfilingError."""
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
    """Makes a profile of the measurements of `shoal_workers.profile`. Pure."""
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
            "attention_rates": _scaled_attention(like, measured["attention_flops"]) if is_gpu else {},
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


def _scaled_attention(like: HardwareProfile, measured_flops: float) -> dict[int, tuple[float, float]]:
    """The rates of the most similar GPU at all lengths, by what one length and heads of 64 have shown."""
    if _ATTENTION_LENGTH not in like.attention_rates:
        return {}
    share = measured_flops / (NARROW_HEAD_SHARE * like.attention_rates[_ATTENTION_LENGTH][0])
    rates = like.attention_rates.items()
    return {length: (share * forward, share * backward) for length, (forward, backward) in rates}


def _uncrowded(groups: dict[int, Any], measured: dict[str, Any]) -> int:
    """The measurement of the largest group with a processor for each rank: the planner itself accounts for crowded
    groups."""
    return max((size for size in groups if size <= int(measured["num_devices"])), default=min(groups))


def _share(measured: dict[str, Any]) -> int:
    """Memory that a CPU rank has if one rank runs per core."""
    return int(measured["memory_bytes"]) // max(1, int(measured["num_devices"]))


def _most_like(device_name: str) -> HardwareProfile:
    """Finds the built-in GPU whose name is a word of the device's name: "NVIDIA H200" -> h200."""
    name_parts = device_name.lower().replace("_", "-").replace("-", " ").split()
    fitting = [p for p in PROFILES.values() if p.kind is DeviceKind.GPU and p.name.split("-")[0] in name_parts]
    if len(fitting) > 1:  # one GPU in sizes: a100-40gb, a100-80gb
        fitting = [p for p in fitting if p.name.split("-")[-1] in name_parts] or fitting
    return fitting[0] if fitting else PROFILES[DEFAULT_GPU]
