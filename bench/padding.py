"""The table of padding in docs/hugging-face.md: `make bench-hugging-face`, or `python bench/padding.py`.

Examples whose lengths are distributed as those of instructions usually are (log-normal), and the micro-batches that
become of them with the same number of tokens in memory: padded to model.seq_len, padded to the longest of a random
micro-batch, of similar lengths (data.max_tokens), and packed. For each the share of the computed tokens that is
padding, and the answers' tokens per second of CPU time in the passes of a small model. Then the
seconds that the order of ten million samples takes. One minute, offline.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests"))

import numpy as np
import torch
from torch import Tensor

from kit.worlds.hugging_face_configs import small_config
from shoal_workers.engine.length_buckets import LengthBuckets
from shoal_workers.engine.sample_order import samples_at
from shoal_workers.tasks.answers import NO_LABEL
from shoal_workers.tasks.sft import SupervisedFineTuning

SEQ_LEN = 1024
BUDGET = 8 * SEQ_LEN
NUM_EXAMPLES = 3_000
NUM_TIMED = 6
"""Micro-batches whose passes are timed."""
NUM_LARGE = 10_000_000


def main() -> None:
    """Prints the table."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rows = list(_rows(Path(folder)))
    sys.stdout.write("| micro-batches | padding | answers' tokens per CPU second |\n|---|---:|---:|\n")
    for name, padding, rate in rows:
        sys.stdout.write(f"| {name} | {100 * padding:.1f} % | {rate:,.0f} |\n")
    made, position = _of_a_large_dataset()
    order = f"The order of {NUM_LARGE:,} samples is made in {made:.1f} s"
    sys.stdout.write(f"{order}; a micro-batch is found in {1e3 * position:.2f} ms.\n")


def _rows(folder: Path) -> Iterable[tuple[str, float, float]]:
    file = folder / "examples.jsonl"
    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(5.0, 0.9, NUM_EXAMPLES).astype(int), 8, SEQ_LEN - 1)
    lines = ({"prompt": "p" * (length // 4), "completion": "c" * (length - length // 4)} for length in lengths)
    file.write_text("\n".join(map(json.dumps, lines)))
    model = {"config": {**small_config("llama"), "max_position_embeddings": SEQ_LEN}, "seq_len": SEQ_LEN}
    given = {"paths": [str(file)], "cache_dir": str(folder), "tokenizer": "bytes", "validation_fraction": 0}

    def batches(group: Any, **data: Any) -> tuple[Any, list[dict[str, Tensor]]]:
        task = SupervisedFineTuning(model, {**given, **data}, 0)
        samples = task.build_dataset("train")
        return task, [task.collate([samples[number] for number in one]) for one in group(samples)]

    def fixed(samples: Any) -> list[Sequence[int]]:
        order, size = samples_at(range(len(samples)), num_samples=len(samples), seed=0), BUDGET // SEQ_LEN
        return [order[first : first + size] for first in range(0, len(order), size)]

    def similar(samples: Any) -> list[Sequence[int]]:
        buckets = LengthBuckets(samples, 0)
        return [buckets.members(position) for position in range(len(buckets))]

    yield "padded to `model.seq_len`", *_measured(*batches(fixed))
    yield "padded to the longest of eight", *_measured(*batches(fixed, max_tokens=BUDGET))
    yield "of similar lengths (`data.max_tokens`)", *_measured(*batches(similar, max_tokens=BUDGET))
    yield "packed (`data.packing`)", *_measured(*batches(fixed, packing=True))


def _measured(task: SupervisedFineTuning, batches: Sequence[dict[str, Tensor]]) -> tuple[float, float]:
    """Share of padding in all micro-batches, and tokens of answers per second of CPU time of some."""
    computed = sum(one["tokens"].numel() for one in batches)
    padding = sum(int((one["tokens"] == 0).sum()) for one in batches) / computed
    torch.manual_seed(0)
    model = task.build_model()
    task.loss(model, batches[0])[0].backward()
    start, num = time.process_time(), 0
    for one in batches[1 : 1 + NUM_TIMED]:
        task.loss(model, one)[0].backward()
        num += int((one["labels"] != NO_LABEL).sum())
    return padding, num / (time.process_time() - start)


class _Lengths:
    """A dataset of which only the lengths are read."""

    content_hash = ""
    tokens_per_micro_batch = 1 << 16

    def __init__(self) -> None:
        self.lengths = np.clip(np.random.default_rng(0).lognormal(5.0, 0.9, NUM_LARGE).astype(np.int64), 8, 4096)

    def __len__(self) -> int:
        return NUM_LARGE


def _of_a_large_dataset() -> tuple[float, float]:
    data = _Lengths()
    start = time.process_time()
    buckets = LengthBuckets(data, 0)
    made = time.process_time() - start
    start = time.process_time()
    for position in range(100):
        buckets.members(position)
    return made, (time.process_time() - start) / 100


if __name__ == "__main__":
    main()
