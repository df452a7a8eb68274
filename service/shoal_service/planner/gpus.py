"""Built-in hardware profiles, from public data sheets, and the share of each number that is achieved in practice.

Peak: dense tensor-core rates of the vendors' data sheets (TF32 for fp32 on NVIDIA's, the matrix fp32 rate on AMD's).

Large matrix products: the best shape of each GPU is measured in stas00/ml-engineering (compute/accelerator, "Maximum
Achievable Matmul FLOPS": A100 271, H100 and H200 795, B200 1745, GB200 1822, MI300X 668 TFLOP/s in bf16; H100 1403,
B200 3433 in fp8). For seconds on end, with random numbers, a product of 8192 x 8192 x 8192 reaches about 0.91 of it on
an H100 (720 TFLOP/s, SemiAnalysis, "MI300X vs H100 vs H200", 2024), since the chip is at its power limit. The same
share is taken for the others: a judgement, as all of the L40S is.

Attention: FlashAttention-2, heads of 128, causal: an H100 from Shah et al. 2024 (figures 5 and 6), an A100 from Dao
2023 (figures 4 to 6, read off the plots). Elsewhere half of what products reach: a judgement. cuDNN on an H100: 1.6
times (Shah et al.).

85 % of the memory bandwidth; 80 % of the bandwidth of links (nccl-tests: 235 of 300 GB/s inside an A100 node, 370 of
450 inside an H100 node, and 40 of 50 GB/s per 400 Gb/s card). Communication beside computation slows it by 18.9 % on
average (arXiv 2507.03114), so 80 % of it are hidden. GPUs of one node differ by 5 % (ml-engineering): the range of 8
normally distributed numbers is 2.85 standard deviations. `shoal profile` measures a machine instead.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal_service.core.hardware_profile import GIB, DeviceKind, HardwareProfile, Link
from shoal_workers.contract.spec import Precision

_T, _G = 1e12, 1e9
_LATENCY_INSIDE_S = {2: 12e-6, 8: 22e-6}
_LATENCY_PCIE_S = {2: 20e-6, 8: 45e-6}
_HOP_INSIDE_S, _HOP_BETWEEN_S = 1.9e-6, 4e-6
_LATENCY_BETWEEN_S = {2: 25e-6} | {
    8 * nodes: 14e-6 + nodes * (7 * _HOP_INSIDE_S + _HOP_BETWEEN_S) for nodes in (2**n for n in range(1, 12))
}
"""Seconds of a collective on a few bytes by the number of ranks. NCCL gathers and scatters between nodes in rings, so a
collective takes a hop to each of the other ranks, 7 of 8 inside nodes (NVIDIA/nccl, src/graph/tuning.cc: ring, LL128).
A measured exchange of two nodes and of a node."""


@dataclass(frozen=True, slots=True)
class _Sheet:
    """Data sheet of a GPU: compute in TFLOP/s, bandwidths in GB/s per direction; `cards`: network cards per GPU."""

    fp32: float
    half: float
    memory_gb: int
    memory_bandwidth: float
    inside: float
    best_tflops: float
    """bf16, of the best shape."""
    multiprocessors: int
    fp8_speed: float = 1.0
    cards: float = 50.0
    host: float = 55.0
    has_nvlink: bool = True
    attention: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())
    """TFLOP/s at 512, 1k, .. 16k tokens, forward and backward; empty: half of what products reach."""
    vendor_attention: float = 1.0
    per_node: int = 8


_SUSTAINED = 0.91
_SPREAD = 0.05 / 2.85
_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
_HOPPER_ATTENTION = (191, 260, 298, 319, 333, 335), (214, 260, 291, 310, 318, 322)
_AMPERE_ATTENTION = (125, 160, 187, 206, 218, 224), (94, 125, 153, 172, 181, 184)
_HOPPER_FP8, _BLACKWELL_FP8 = 1403 / 795, 3433 / 1745

_SHEETS = {
    # NVIDIA H100 SXM5: 989 TFLOP/s bf16, 494 TF32, 80 GB at 3.35 TB/s, NVLink 4 900 GB/s both ways, 8 x 400 Gb/s
    "h100": _Sheet(494, 989, 80, 3350, 450, 795, 132, _HOPPER_FP8, attention=_HOPPER_ATTENTION, vendor_attention=1.6),
    # NVIDIA H200 SXM: the same chip, 141 GB at 4.8 TB/s
    "h200": _Sheet(494, 989, 141, 4800, 450, 795, 132, _HOPPER_FP8, attention=_HOPPER_ATTENTION, vendor_attention=1.6),
    # NVIDIA H800 SXM: the same chip as an H100, NVLink 400 GB/s both ways
    "h800": _Sheet(494, 989, 80, 3350, 200, 795, 132, _HOPPER_FP8, attention=_HOPPER_ATTENTION, vendor_attention=1.6),
    # NVIDIA A100 SXM4: 312 TFLOP/s bf16, 156 TF32, 1555 and 2039 GB/s, NVLink 3 600 GB/s, 8 x 200 Gb/s (DGX A100)
    "a100-80gb": _Sheet(156, 312, 80, 2039, 300, 271, 108, cards=25.0, host=25.0, attention=_AMPERE_ATTENTION),
    "a100-40gb": _Sheet(156, 312, 40, 1555, 300, 271, 108, cards=25.0, host=25.0, attention=_AMPERE_ATTENTION),
    # NVIDIA L40S: 362 TFLOP/s bf16 dense, 183 TF32, 48 GB at 864 GB/s, PCIe 4 x16, 8 GPUs share 2 x 200 Gb/s
    "l40s": _Sheet(183, 362, 48, 864, 26, 263, 142, cards=6.25, host=25.0, has_nvlink=False),
    # NVIDIA B200 (HGX): 2250 TFLOP/s bf16 dense, 1120 TF32, 180 GB at 7.7 TB/s, NVLink 5 1800 GB/s, 8 x 400 Gb/s
    "b200": _Sheet(1120, 2250, 180, 7700, 900, 1745, 148, _BLACKWELL_FP8),
    # NVIDIA GB200 NVL72: 2500 TFLOP/s bf16 dense, 1250 TF32, 186 GB at 8 TB/s, 72 GPUs in one NVLink domain
    "gb200": _Sheet(1250, 2500, 186, 8000, 900, 1822, 148, _BLACKWELL_FP8, host=225.0, per_node=72),
    # AMD MI300X: 1307 TFLOP/s bf16, 163 fp32 matrix, 192 GB at 5.3 TB/s, Infinity Fabric 7 x 64 GB/s, 8 x 400 Gb/s
    "mi300x": _Sheet(163, 1307, 192, 5300, 448, 668, 304),
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
        matmul_efficiency=_SUSTAINED * sheet.best_tflops / sheet.half,
        attention_efficiency=0.50 * sheet.best_tflops / sheet.half,
        half_width=128,
        multiprocessors=sheet.multiprocessors,
        fp8_speed=sheet.fp8_speed,
        attention_rates={
            length: (forward * _T, backward * _T)
            for length, forward, backward in zip(_LENGTHS, *sheet.attention, strict=False)
        },
        vendor_attention=sheet.vendor_attention,
        spread=_SPREAD,
        memory_bytes=sheet.memory_gb * 10**9 if sheet.memory_gb > 80 else sheet.memory_gb * GIB,
        reserved_bytes=2 * GIB,
        usable=0.92,
        memory_bandwidth=0.85 * sheet.memory_bandwidth * _G,
        host_bandwidth=0.8 * sheet.host * _G,
        inside=Link(
            bandwidth=0.8 * sheet.inside * _G, latency_s=_LATENCY_INSIDE_S if sheet.has_nvlink else _LATENCY_PCIE_S
        ),
        between=Link(bandwidth=0.8 * sheet.cards * _G, latency_s=_LATENCY_BETWEEN_S),
        ranks_per_node=sheet.per_node,
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
