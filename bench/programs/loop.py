"""The same work as a loop that Shoal runs in place. Run by `main.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from work import GLOBAL_BATCH, MICRO_BATCH, Samples, model, stamp

import shoal


def train(run: Any) -> None:
    network = model()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4)
    run.track(network=network, optimizer=optimizer)
    for x, y in run.batches(Samples(), global_size=GLOBAL_BATCH, micro_size=MICRO_BATCH):
        run.backward(nn.functional.cross_entropy(network(x), y), weight=len(x))
        if run.steps(optimizer) and run.is_rank_zero:
            stamp(run.step)


shoal.run(train)
