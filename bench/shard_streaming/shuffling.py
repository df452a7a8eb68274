"""How far the order by blocks is from a full shuffle, for one epoch of a data set that is sorted in the worst way: each
shard has one label. Called by `main`.

    labels in a batch     different ones, of as many samples
    same label again      share of samples whose successor has the same label
    spread of batches     standard deviation of the mean number of a batch's samples, against a full shuffle
    distance              of two samples that lie beside each other, in positions, against a full shuffle (median)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal_workers.data.streaming.order import BlockOrder, EqualSizes
from shoal_workers.engine.sample_order import samples_at

NUM_SHARDS, SAMPLES_PER_SHARD, BATCH_SIZE = 1000, 1000, 256
_SEED = 1


@dataclass(frozen=True)
class Quality:
    order: str
    labels_in_a_batch: float
    same_label_again: float
    spread_of_batches: float
    distance: float


def qualities(blocks: tuple[int, ...]) -> list[Quality]:
    """The full shuffle first, then blocks of each of these numbers of shards."""
    num = NUM_SHARDS * SAMPLES_PER_SHARD
    full = np.array(samples_at(range(num), num_samples=num, seed=_SEED))
    sizes = EqualSizes(NUM_SHARDS, SAMPLES_PER_SHARD)
    found = [_quality("all samples", full, full)]
    for block in blocks:
        order = np.array(BlockOrder(sizes, block).samples_at(range(num), _SEED))
        found.append(_quality(f"blocks of {block}", order, full))
    return found


def _quality(name: str, order: Any, full: Any) -> Quality:
    labels = order // SAMPLES_PER_SHARD
    batches = len(order) // BATCH_SIZE
    in_batches = labels[: batches * BATCH_SIZE].reshape(batches, BATCH_SIZE)
    return Quality(
        name,
        float(np.mean([len(np.unique(batch)) for batch in in_batches])),
        float(np.mean(labels[1:] == labels[:-1])),
        _spread(order, batches) / _spread(full, batches),
        _distance(order) / _distance(full),
    )


def _spread(order: Any, batches: int) -> float:
    return float(order[: batches * BATCH_SIZE].reshape(batches, BATCH_SIZE).mean(axis=1).std())


def _distance(order: Any) -> float:
    positions = np.empty(len(order), dtype=np.int64)
    positions[order] = np.arange(len(order))
    return float(np.median(np.abs(np.diff(positions))))
