"""Generates examples/trace.csv: a small job trace from stated distributions. The same seed gives the same file.

    python tools/trace_generator.py [--jobs 24] [--seed 16] [--out examples/trace.csv]

| column | distribution |
|---|---|
| `submit_s` | a Poisson process, one job every 150 s on average |
| `work_samples` | time alone on one worker: lognormal, median 20 minutes, sigma 1.0; times the rate of one worker |
| `curve` | rate of one worker log-uniform in 50 to 500 samples/s; Amdahl's law with a serial part of 2, 6 or 15 % |
| `min_workers`, `max_workers` | 1 (four of five jobs) or 2; 4 or 8 |
| `asked_workers` | uniform in 2 to max_workers |
| `priority` | 0, and 50 for one job in eight |
| `project` | vision for three of five jobs, otherwise speech |
"""

from __future__ import annotations

import argparse
import csv
import io
import math
import random
from pathlib import Path

_COLUMNS = (
    "job",
    "submit_s",
    "work_samples",
    "min_workers",
    "max_workers",
    "asked_workers",
    "curve",
    "priority",
    "project",
)
_SIZES = (1, 2, 3, 4, 6, 8)
NUM_JOBS, SEED = 24, 16
EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "trace.csv"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=NUM_JOBS)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--out", type=Path, default=EXAMPLE)
    options = parser.parse_args()
    options.out.write_text(generate(options.jobs, options.seed), encoding="utf-8")


def generate(num_jobs: int, seed: int) -> str:
    """The text of the file."""
    draw = random.Random(seed)
    text = io.StringIO()
    text.write(f"# made by tools/trace_generator.py from seed {seed}; its docstring has the distributions\n")
    writer = csv.DictWriter(text, _COLUMNS, lineterminator="\n")
    writer.writeheader()
    at = 0.0
    for number in range(num_jobs):
        at += draw.expovariate(1 / 150)
        writer.writerow(_job(draw, number, at))
    return text.getvalue()


def _job(draw: random.Random, number: int, at: float) -> dict[str, object]:
    rate = math.exp(draw.uniform(math.log(50), math.log(500)))
    serial = draw.choice((0.02, 0.06, 0.15))
    alone_s = draw.lognormvariate(math.log(1200), 1.0)
    most = draw.choice((4, 8))
    return {
        "job": f"job-{number:02d}",
        "submit_s": round(at),
        "work_samples": round(alone_s * rate),
        "min_workers": 1 if draw.random() < 0.8 else 2,
        "max_workers": most,
        "asked_workers": draw.randint(2, most),
        "curve": " ".join(f"{size}:{rate / (serial + (1 - serial) / size):.1f}" for size in _SIZES if size <= most),
        "priority": 50 if draw.random() < 0.125 else 0,
        "project": "vision" if draw.random() < 0.6 else "speech",
    }


if __name__ == "__main__":
    main()
