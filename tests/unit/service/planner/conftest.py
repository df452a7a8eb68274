"""Small jobs to plan for, and hardware with round numbers."""

from collections.abc import Callable
from typing import Any

import pytest

from shoal_service.core.hardware_profile import DeviceKind, Link
from shoal_service.planner import HardwareProfile
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.spec import JobSpec, Precision

ROUND = HardwareProfile(
    name="round",
    kind=DeviceKind.GPU,
    peak_flops=dict.fromkeys(Precision, 1e12),
    matmul_efficiency=0.5,
    attention_efficiency=0.25,
    half_width=0,
    memory_bytes=10**12,
    reserved_bytes=1000,
    usable=1.0,
    memory_bandwidth=1e11,
    host_bandwidth=1e10,
    inside=Link(bandwidth=1e10, latency_s={1: 0.0}),
    between=Link(bandwidth=1e9, latency_s={1: 1e-3}),
    ranks_per_node=4,
    overlap=0.0,
    block_overhead_s=0.0,
    step_overhead_s=0.0,
)


@pytest.fixture
def round_numbers() -> HardwareProfile:
    """1 TFLOP/s, 0.1 TB/s, 10 GB/s inside nodes of 4, 1 GB/s and 1 ms between them, nothing hidden."""
    return ROUND


@pytest.fixture
def job() -> Callable[..., JobSpec]:
    """A job by its model; other sections by name."""

    def make(model: dict[str, Any] | None = None, **sections: Any) -> JobSpec:
        document: dict[str, Any] = {"stop": {"steps": 1}, "data": {"corpus": "python-stdlib"}, "model": model or {}}
        return parse_spec({**document, **sections})

    return make
