"""From measurements to a hardware profile."""

from typing import Any

import pytest

from shoal_service.control.hardware_profiles import profile_of
from shoal_service.planner.gpus import PROFILES
from shoal_workers.contract.spec import Precision

CPU: dict[str, Any] = {
    "device": "cpu",
    "name": "cpu",
    "num_devices": 2,
    "memory_bytes": 16e9,
    "matmul_flops": {"fp32": 1e11, "bf16": 5e10, "fp16": 5e10},
    "half_width": 12.0,
    "attention_flops": 3e10,
    "elementwise_bytes_per_s": 9e9,
    "host_bytes_per_s": 8e9,
    "groups": {"2": {"latency_s": 1e-4, "bytes_per_s": 2e9}, "4": {"latency_s": 3e-4, "bytes_per_s": 1e9}},
}


def test_a_cpus_ranks_share_its_cores_and_memory() -> None:
    profile = profile_of(CPU)
    assert (profile.name, profile.measured, profile.processors_per_node) == ("cpu", True, 2)
    assert profile.memory_bytes == 8_000_000_000
    assert profile.peak_flops[Precision.BF16] * profile.matmul_efficiency == 5e10
    assert profile.inside.bandwidth == 2e9, "of the group that has a core for each"
    assert profile.inside.latency(2) == 1e-4
    assert profile.sharing(8) == 4.0


@pytest.mark.parametrize(
    ("device", "like"),
    [("NVIDIA H200", "h200"), ("NVIDIA A100-SXM4-40GB", "a100-40gb"), ("NVIDIA H100 80GB HBM3", "h100"), ("?", "h100")],
)
def test_a_gpu_profile_uses_the_data_sheet_for_what_cannot_be_measured(device: str, like: str) -> None:
    measured = CPU | {"device": "cuda", "name": device, "num_devices": 1, "groups": {}}
    measured["matmul_flops"] = {"fp32": 4e13, "bf16": 1.5e14, "fp16": 1.5e14}
    profile = profile_of(measured)
    assert profile.peak_flops == PROFILES[like].peak_flops
    assert profile.matmul_efficiency == pytest.approx(1.5e14 / profile.peak_flops[Precision.BF16])
    assert (profile.inside, profile.between) == (PROFILES[like].inside, PROFILES[like].between)
    assert profile.name == f"{like}-measured"
