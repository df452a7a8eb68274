"""Measures the machine it runs on: `python -m shoal_workers.profile`. Prints one JSON object to standard output.

    one process      matrix products by precision, attention, element-wise work, memory, host copies (GPU)
    2, 4, 8 ... N    all-gather of a large tensor, all-reduce of one number: gloo on CPU, NCCL on GPUs

The machine should be idle. Rates are medians over repetitions that take `--seconds` together, after a warm-up. Groups
are real processes, so that they compete for cores and memory as workers do. The
service makes a hardware profile of the result.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.multiprocessing.spawn import spawn
from torch.utils.benchmark import Timer

_MATMUL_SIDE = {"cpu": 1024, "cuda": 8192}
_LARGE_BYTES = {"cpu": 16 << 20, "cuda": 1 << 30}
_TIMEOUT = timedelta(seconds=120)
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure this machine.")
    parser.add_argument("--processes", type=int, default=8, help="largest group")
    parser.add_argument("--seconds", type=float, default=0.5, help="for each rate")
    parser.add_argument("--threads", type=int, default=1, help="of one process on a CPU")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    measured: dict[str, Any] = measure_device(device, arguments.seconds)
    largest = min(arguments.processes, torch.cuda.device_count()) if device.type == "cuda" else arguments.processes
    sizes = [size for size in (2, 4, 8, 16, 32, 64) if size <= largest]
    measured["groups"] = {size: measure_group(size, device.type, arguments.seconds) for size in sizes}
    sys.stdout.write(json.dumps(measured) + "\n")


def measure_device(device: torch.device, seconds: float) -> dict[str, Any]:
    """Measure the rates of one rank in FLOP/s and bytes per second; sizes are in bytes."""
    side = _MATMUL_SIDE[device.type]
    is_gpu = device.type == "cuda"
    host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "device": device.type,
        "name": torch.cuda.get_device_name() if is_gpu else "cpu",
        "num_devices": torch.cuda.device_count() if is_gpu else os.cpu_count() or 1,
        "memory_bytes": torch.cuda.get_device_properties(0).total_memory if is_gpu else host_bytes,
        "matmul_flops": {name: _measure_matmul(device, dtype, side, seconds) for name, dtype in _DTYPES.items()},
        "half_width": _measure_half_width(device, side, seconds),
        "attention_flops": _measure_attention(device, seconds),
        "elementwise_bytes_per_s": _measure_elementwise(device, seconds),
        "host_bytes_per_s": _measure_host_copy(device, seconds),
    }


def measure_group(size: int, device_type: str, seconds: float) -> dict[str, float]:
    """Measure {"latency_s", "bytes_per_s"} of `size` processes on this machine, as the slowest of them sees them."""
    with tempfile.TemporaryDirectory(prefix="shoal-profile-") as folder:
        spawn(_measure_rank, args=(size, device_type, seconds, folder), nprocs=size)  # type: ignore[no-untyped-call]
        with open(os.path.join(folder, "measured.json"), encoding="utf-8") as file:  # noqa: PTH118, PTH123
            measured: dict[str, float] = json.load(file)
    return measured


def _measure_rank(rank: int, size: int, device_type: str, seconds: float, folder: str) -> None:
    torch.set_num_threads(1)
    is_gpu = device_type == "cuda"
    if is_gpu:
        torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store", size)  # type: ignore[attr-defined]
    dist.init_process_group("nccl" if is_gpu else "gloo", store=store, rank=rank, world_size=size, timeout=_TIMEOUT)
    device = torch.device(device_type, rank if is_gpu else 0) if is_gpu else torch.device("cpu")
    scalar = torch.zeros(1, device=device)
    part = torch.zeros(_LARGE_BYTES[device_type] // 4 // size, device=device)
    whole = torch.zeros(part.numel() * size, device=device)
    latency_s = _time_collective(lambda: dist.all_reduce(scalar), device, seconds)
    gather_s = _time_collective(lambda: dist.all_gather_into_tensor(whole, part), device, seconds)
    moved = (size - 1) / size * whole.numel() * 4
    slowest = torch.tensor([latency_s, gather_s], device=device, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    if rank == 0:
        latency_s, gather_s = slowest.tolist()
        measured = {"latency_s": latency_s, "bytes_per_s": moved / max(gather_s - latency_s, 1e-9)}
        with open(f"{folder}/measured.json", "w", encoding="utf-8") as file:  # noqa: PTH123
            json.dump(measured, file)
    dist.barrier()
    dist.destroy_process_group()


def _time_collective(collective: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Return the median seconds of a collective. Rank 0 decides how often all ranks repeat it."""
    for _ in range(3):
        collective()
    once = _time_once(collective, device)
    times = torch.tensor([max(5, min(500, int(seconds / max(once, 1e-6))))], device=device)
    dist.broadcast(times, 0)
    return statistics.median(_time_once(collective, device) for _ in range(int(times.item())))


def _time_calls(work: Callable[[], object], seconds: float) -> float:
    """Return the median seconds of one call."""
    timer = Timer("work()", globals={"work": work}, num_threads=torch.get_num_threads())
    return float(timer.blocked_autorange(min_run_time=seconds).median)


def _time_once(work: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _measure_matmul(device: torch.device, dtype: torch.dtype, side: int, seconds: float) -> float:
    if device.type == "cpu" and dtype is torch.float16:
        return _measure_matmul(device, torch.bfloat16, side, seconds)  # fp16 on a CPU is emulated, or as fast
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    return float(2 * side**3 / _time_calls(lambda: a @ b, seconds))


def _measure_half_width(device: torch.device, side: int, seconds: float) -> float:
    """Return the side w at which a product reaches half of its best rate, from rate(w) = best x w / (w + half)."""
    width = side // 16
    wide, narrow = torch.randn(side, side, device=device), torch.randn(side, width, device=device)
    best = 2 * side**3 / _time_calls(lambda: wide @ wide, seconds)
    rate = 2 * side * side * width / _time_calls(lambda: wide @ narrow, seconds)
    return float(max(0.0, width * (best / rate - 1)))


def _measure_attention(device: torch.device, seconds: float) -> float:
    """Measure causal attention, forward only: half of the scores are counted."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    length, heads = (4096, 16) if device.type == "cuda" else (512, 4)
    q = torch.randn(1, heads, length, 64, device=device, dtype=dtype)
    seconds_each = _time_calls(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True), seconds)
    return float(2 * length * length * 64 * heads / seconds_each)


def _measure_elementwise(device: torch.device, seconds: float) -> float:
    """Return the bytes per second that an addition reads and writes."""
    x = torch.randn(_LARGE_BYTES[device.type] // 4, device=device)
    y = torch.empty_like(x)
    return float(2 * x.numel() * 4 / _time_calls(lambda: torch.add(x, 1.0, out=y), seconds))


def _measure_host_copy(device: torch.device, seconds: float) -> float:
    source = torch.empty(_LARGE_BYTES[device.type] // 4, pin_memory=device.type == "cuda")
    target = torch.empty_like(source, device=device, pin_memory=False)
    return float(source.numel() * 4 / _time_calls(lambda: target.copy_(source, non_blocking=True), seconds))


if __name__ == "__main__":
    main()
