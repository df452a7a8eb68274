"""One GPU: model FLOPs utilisation of a 1.3 B parameter model in bf16 with compiled blocks, and Shoal's engine against
a plain loop: `make bench-gpu`.

    python bench/gpu.py [--steps 30] [--trials 3]

    engine    `torchrun -m shoal_workers.run`: no Ray, no service
    plain     bench/plain_loop.py: the same model, data and optimizer, nothing of Shoal's engine

The two take turns. A step's time is the median after warm-up. MFU is the model's arithmetic, without recomputation,
divided by the dense bf16 peak of the data sheet. fp8 is not supported, and the JSON says so. Without a GPU the
benchmark prints that there is none and succeeds. The last line is always JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml

from shoal_service.core.hardware_profile import DeviceKind
from shoal_service.planner import HardwareProfile
from shoal_service.planner.gpus import PROFILES
from shoal_service.planner.shape import shape_of_language_model
from shoal_workers.contract.language_model import LanguageModelConfig
from shoal_workers.contract.spec import Precision
from under_torchrun import run_engine, run_plain_loop

LEAST_RATIO = 0.98
_FP8 = "not supported: `precision` refuses it and names what it would need"
_WARM_UP_STEPS = 10
_MODEL = {"dim": 2048, "num_layers": 24, "num_heads": 16, "seq_len": 2048, "vocab_size": 32_000}


def main() -> int:
    arguments = _arguments()
    if not torch.cuda.is_available():
        print("This machine has no GPU: MFU and the ratio to a plain loop are not measured.")
        print(json.dumps({"gpu": None, "mfu": None, "ratio": None, "fp8": _FP8, "passed": None}))
        return 0
    spec = _spec(arguments)
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        path = Path(folder) / "spec.yaml"
        path.write_text(yaml.safe_dump(spec))
        trials = []
        for number in range(arguments.trials):
            trial = {"engine": _engine(path, Path(folder) / f"engine-{number}"), "plain": _plain(path)}
            trials.append(trial)
            print(", ".join(f"{name} {1000 * step_s:.1f} ms a step" for name, step_s in trial.items()), flush=True)
    figures = _figures(spec, trials)
    print(json.dumps(figures))
    return 0 if figures["passed"] else 1


def _figures(spec: dict[str, Any], trials: list[dict[str, float]]) -> dict[str, Any]:
    shape = shape_of_language_model(LanguageModelConfig(**_MODEL), on_gpu=True)
    tokens = spec["batch"]["global_size"] * shape.seq_len
    step_s = statistics.median(trial["engine"] for trial in trials)
    ratio = statistics.median(trial["plain"] / trial["engine"] for trial in trials)
    name = torch.cuda.get_device_name()
    profile = _data_sheet(name)
    peak = profile.peak_flops[Precision.BF16] if profile else None
    return {
        "gpu": name,
        "params": shape.params,
        "tokens_per_s": round(tokens / step_s),
        "flops": shape.flops_per_token * tokens / step_s,
        "mfu": round(shape.flops_per_token * tokens / step_s / peak, 4) if peak else None,
        "ratio": round(ratio, 4),
        "least_ratio": LEAST_RATIO,
        "step_ms": {name: round(1000 * statistics.median(t[name] for t in trials), 2) for name in trials[0]},
        "fp8": _FP8,
        "software": f"torch {torch.__version__}",
        "passed": ratio >= LEAST_RATIO,
    }


def _data_sheet(device_name: str) -> HardwareProfile | None:
    """The built-in profile with the GPU's peak. None if there is none: then MFU is not known."""
    words = device_name.lower().replace("-", " ").replace("_", " ").split()
    return next((p for p in PROFILES.values() if p.kind is DeviceKind.GPU and p.name.split("-")[0] in words), None)


def _spec(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "name": "bench-gpu",
        "model": _MODEL,
        "data": {"corpus": "python-stdlib"},
        "batch": {"global_size": 4 * arguments.micro_size, "micro_size": arguments.micro_size},
        "optimizer": {"fused": True},
        "schedule": {"warmup_steps": 5},
        "precision": "bf16",
        "compile": True,
        "stop": {"steps": arguments.steps},
        "checkpoint": {"every_steps": None},
        "validation": {"samples": 0},
        "worker": {"gpus": 1},
    }


def _engine(path: Path, checkpoints: Path) -> float:
    return run_engine(path, checkpoints, 1, environment={}).steady_step_s(_WARM_UP_STEPS)


def _plain(path: Path) -> float:
    return run_plain_loop(path, 1, environment={}).steady_step_s(_WARM_UP_STEPS)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--micro-size", type=int, default=8, help="samples of 2,048 tokens; a step has four of these")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
