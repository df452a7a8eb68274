"""How fast one core turns text files into shards of tokens.

    python bench/data.py [--mib 32] [--rounds 5]

The input is eight files of random printable bytes with `tokenizer: bytes`. The last line is JSON: megabytes of text per
second of CPU time and of wall-clock time, as minimum, median and maximum of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

# Started as a script from any directory: the shared modules are found beside this folder.
sys.path.append(str(Path(__file__).parents[1] / "tools"))

from measurements.machine import describe
from shoal_workers.contract.model.lm import TextDataConfig
from shoal_workers.data.prepare import prepare_corpus

_FILES = 8
_MIB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    rates: dict[str, list[float]] = {"cpu_mb_per_s": [], "wall_mb_per_s": []}
    with tempfile.TemporaryDirectory() as directory:
        rng = np.random.default_rng(0)
        for number in range(_FILES):
            text = rng.integers(32, 127, arguments.mib * _MIB // _FILES, dtype=np.uint8)
            Path(directory, f"{number}.txt").write_bytes(text.tobytes())
        for turn in range(arguments.rounds):
            config = TextDataConfig(paths=(f"{directory}/*.txt",), cache_dir=f"{directory}/cache-{turn}")
            cpu, wall = time.process_time(), time.perf_counter()
            megabytes = prepare_corpus(config, lambda _: None).index.text_bytes / 1e6
            rates["cpu_mb_per_s"].append(megabytes / (time.process_time() - cpu))
            rates["wall_mb_per_s"].append(megabytes / (time.perf_counter() - wall))
            print(f"{rates['cpu_mb_per_s'][-1]:6.1f} MB per second of CPU time", flush=True)
    ranges = {name: [min(found), statistics.median(found), max(found)] for name, found in rates.items()}
    print(json.dumps({"machine": describe(), "load": os.getloadavg()[0], **ranges}))


if __name__ == "__main__":
    main()
