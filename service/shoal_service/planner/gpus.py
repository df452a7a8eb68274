"""Built-in hardware profiles, from public data sheets, and the share of each number that is achieved in practice.

Peak: dense tensor-core rates of the vendors' data sheets (TF32 for fp32 on NVIDIA's, the matrix fp32 rate on AMD's).
Achieved: 66 % of the peak in large matrix products, 50 % in attention (FlashAttention-2 and 3 papers: 50-75 % of an
A100's and H100's); 85 % of the memory bandwidth; 80 % of the bandwidth of links (`nccl-tests` shows 370 of
450 GB/s inside an H100 node, and 40 of 50 GB/s per 400 Gb/s card). `shoal profile` measures a machine instead.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal_service.core.hardware_profile import GIB, DeviceKind, HardwareProfile, Link
from shoal_workers.contract.spec import Precision

_T, _G = 1e12, 1e9
_LATENCY_INSIDE_S = {2: 12e-6, 8: 22e-6}
_LATENCY_PCIE_S = {2: 20e-6, 8: 45e-6}
_LATENCY_BETWEEN_S = {2: 25e-6, 64: 80e-6, 1024: 180e-6}
"""Seconds of a small all-reduce of NCCL by the number of ranks: rings inside a node, trees between nodes."""


@dataclass(frozen=True, slots=True)
class _Sheet:
    """Data sheet of a GPU: compute in TFLOP/s, bandwidths in GB/s per direction; `cards`: network cards per GPU."""

    fp32: float
    half: float
    memory_gb: int
    memory_bandwidth: float
    inside: float
    cards: float = 50.0
    host: float = 55.0
    has_nvlink: bool = True


_SHEETS = {
    # NVIDIA H100 SXM5: 989 TFLOP/s bf16, 494 TF32, 80 GB at 3.35 TB/s, NVLink 4 900 GB/s both ways, 8 x 400 Gb/s
    "h100": _Sheet(494, 989, 80, 3350, 450),
    # NVIDIA H200 SXM: the same chip, 141 GB at 4.8 TB/s
    "h200": _Sheet(494, 989, 141, 4800, 450),
    # NVIDIA A100 SXM4: 312 TFLOP/s bf16, 156 TF32, 1555 and 2039 GB/s, NVLink 3 600 GB/s, 8 x 200 Gb/s (DGX A100)
    "a100-80gb": _Sheet(156, 312, 80, 2039, 300, cards=25.0, host=25.0),
    "a100-40gb": _Sheet(156, 312, 40, 1555, 300, cards=25.0, host=25.0),
    # NVIDIA L40S: 362 TFLOP/s bf16 dense, 183 TF32, 48 GB at 864 GB/s, PCIe 4 x16, 8 GPUs share 2 x 200 Gb/s
    "l40s": _Sheet(183, 362, 48, 864, 26, cards=6.25, host=25.0, has_nvlink=False),
    # NVIDIA B200 (HGX): 2250 TFLOP/s bf16 dense, 1120 TF32, 180 GB at 7.7 TB/s, NVLink 5 1800 GB/s, 8 x 400 Gb/s
    "b200": _Sheet(1120, 2250, 180, 7700, 900),
    # AMD MI300X: 1307 TFLOP/s bf16, 163 fp32 matrix, 192 GB at 5.3 TB/s, Infinity Fabric 7 x 64 GB/s, 8 x 400 Gb/s
    "mi300x": _Sheet(163, 1307, 192, 5300, 448),
}


def _gpu(name: str, sheet: _Sheet) -> HardwareProfile:
    return HardwareProfile(
        name=name,
        kind=DeviceKind.GPU,
        peak_flops={
            Precision.FP32: sheet.fp32 * _T,
            Precision.BF16: sheet.half * _T,
            Precision.FP16: sheet.half * _T,
        },
        matmul_efficiency=0.66,
        attention_efficiency=0.50,
        half_width=128,
        memory_bytes=sheet.memory_gb * 10**9 if sheet.memory_gb > 80 else sheet.memory_gb * GIB,
        reserved_bytes=2 * GIB,
        usable=0.92,
        memory_bandwidth=0.85 * sheet.memory_bandwidth * _G,
        host_bandwidth=0.8 * sheet.host * _G,
        inside=Link(
            bandwidth=0.8 * sheet.inside * _G, latency_s=_LATENCY_INSIDE_S if sheet.has_nvlink else _LATENCY_PCIE_S
        ),
        between=Link(bandwidth=0.8 * sheet.cards * _G, latency_s=_LATENCY_BETWEEN_S),
        ranks_per_node=8,
        overlap=0.8,
        block_overhead_s=60e-6,
        step_overhead_s=5e-3,
    )


CPU = HardwareProfile(
    name="cpu",
    kind=DeviceKind.CPU,
    # one core with AVX-512 at 2.5 GHz: 2 x 16 lanes x 2 = 160 GFLOP/s by the book; without AMX bf16 is no faster
    peak_flops={Precision.FP32: 160e9, Precision.BF16: 160e9, Precision.FP16: 160e9},
    matmul_efficiency=0.5,
    attention_efficiency=0.25,
    half_width=16,
    memory_bytes=64 * GIB,
    reserved_bytes=300 * 1024 * 1024,
    usable=0.9,
    memory_bandwidth=8e9,
    host_bandwidth=8e9,
    # gloo over loopback
    inside=Link(bandwidth=0.8e9, latency_s={2: 0.3e-3, 8: 1.5e-3}),
    between=Link(bandwidth=0.8e9, latency_s={2: 0.5e-3, 8: 2e-3}),
    ranks_per_node=64,
    processors_per_node=0,
    overlap=0.0,
    block_overhead_s=1e-3,
    step_overhead_s=5e-3,
)
"""One core for each rank, as `worker.cpus: 1` reserves it."""

PROFILES = {CPU.name: CPU, **{name: _gpu(name, sheet) for name, sheet in _SHEETS.items()}}
DEFAULT_GPU = "h100"
