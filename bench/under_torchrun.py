"""Training runs under torchrun without Ray and service: Shoal's engine (`shoal_workers.run`) and the plain loop.

Called by the benchmarks that compare step times. A failed run ends the benchmark with the end of its error output.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_PLAIN_LOOP = Path(__file__).parent / "plain_loop.py"
GLOO = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
"""Environment of CPU runs."""
_STEP = re.compile(r"^step (\d+)  loss (\S+) .* ([\d.]+) ms$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Run:
    """A run, step by step."""

    step_s: tuple[float, ...]
    losses: tuple[str, ...] = ()
    """Losses as they are printed."""

    def steady_step_s(self, warm_up_steps: int) -> float:
        """Median seconds of a step after warm-up, without the last step, which saves."""
        return statistics.median(self.step_s[warm_up_steps:-1])


def run_engine(spec_path: Path, checkpoints: Path, num_processes: int, environment: Mapping[str, str] = GLOO) -> Run:
    """Runs Shoal's engine on the spec."""
    out = _torchrun(
        ["-m", "shoal_workers.run", str(spec_path), "--checkpoint-dir", str(checkpoints)], num_processes, environment
    )
    found = _STEP.findall(out)
    return Run(tuple(float(ms) / 1000 for _, _, ms in found), tuple(loss for _, loss, _ in found))


def run_plain_loop(
    spec_path: Path, num_processes: int, environment: Mapping[str, str] = GLOO, options: tuple[str, ...] = ()
) -> Run:
    """Runs bench/plain_loop.py on the same spec."""
    out = _torchrun([str(_PLAIN_LOOP), str(spec_path), *options], num_processes, environment)
    return Run(tuple(json.loads(out.strip().splitlines()[-1])["step_s"]))


def _torchrun(arguments: list[str], num_processes: int, environment: Mapping[str, str]) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}"]
    done = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )
    if done.returncode:
        raise SystemExit(f"torchrun failed:\n{done.stderr[-3000:]}")
    return done.stdout
