"""The same small regression from every kind of data: `loaders.py KIND LEDGER [STEPS]`.

Each rank notes in the directory LEDGER which samples it has read for which step. Reading draws random numbers, as an
augmentation does, so the losses show whether these are the same too.
"""

import itertools
import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler, get_worker_info

import shoal

STEPS, GLOBAL_SIZE, MICRO_SIZE, SAMPLES = 8, 12, 3, 60


def sample(index, noise=0.01):
    """With noise that is drawn when it is read."""
    return index, torch.tensor([index * 0.1, index % 7]).sin() + noise * torch.randn(2)


class Points:
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return sample(index)


class Line(IterableDataset):
    """Every `num_parts`-th sample from `part` on."""

    def __init__(self, part=0, num_parts=1):
        self.part, self.num_parts, self.position = part, num_parts, 0

    def __iter__(self):
        info = get_worker_info()
        part, num_parts = self.part, self.num_parts
        if info is not None:
            part, num_parts = part * info.num_workers + info.id, num_parts * info.num_workers
        own = range(part, SAMPLES, num_parts)
        while self.position < len(own):
            self.position += 1
            # What processes of a loader of the program's own draw is not part of its state.
            yield sample(own[self.position - 1], noise=0.01 if info is None else 0.0)
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class ByRank(Line):
    """Divides by rank what Shoal divides."""

    def __init__(self):
        super().__init__(torch.distributed.get_rank() if torch.distributed.is_initialized() else 0, 3)


def stateful(data, num_workers=0):
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(data, batch_size=MICRO_SIZE, num_workers=num_workers)


def batches(run, kind):
    micro = {"global_size": GLOBAL_SIZE, "micro_size": MICRO_SIZE}
    size = {"global_size": GLOBAL_SIZE}
    match kind:
        case "dataset":
            return run.batches(Points(), **micro)
        case "workers":
            return run.batches(Points(), **micro, num_workers=2)
        case "passes":
            return itertools.chain.from_iterable(run.global_batches(Points(), **micro, num_workers=1))
        case "loader":
            return run.batches(DataLoader(Points(), batch_size=MICRO_SIZE, shuffle=True, num_workers=1), **size)
        case "weighted":
            sampler = WeightedRandomSampler([1.0, 2.0] * (SAMPLES // 2), SAMPLES, replacement=False)
            return run.batches(DataLoader(Points(), batch_size=MICRO_SIZE, sampler=sampler), **size)
        case "iterable":
            return run.batches(Line(), **micro)
        case "stateful":
            return run.batches(stateful(Line(), num_workers=2), **size)
        case "streams":
            return run.batches(lambda stream, num: DataLoader(Line(stream, num), batch_size=MICRO_SIZE), **size)
        case "stateful_streams":
            return run.batches(lambda stream, num: stateful(Line(stream, num), num_workers=1), **size, num_streams=4)
        case "by_rank":
            return run.batches(ByRank(), **micro)
    raise ValueError(kind)


def train(run):
    kind, ledger, *steps = sys.argv[1:]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    run.track(model=model, optimizer=optimizer)
    for indices, x in batches(run, kind):
        if run.step == int(*steps or (STEPS,)):
            return
        note = Path(ledger, f"{run.step}.{run.world_size}.{run.rank}.{os.getpid()}")
        with note.open("a") as file:
            file.writelines(f"{index}\n" for index in indices.tolist())
        run.backward((model(x).squeeze(1) - x.prod(1)).square().mean(), weight=len(x))
        run.steps(optimizer)


if __name__ == "__main__":
    shoal.run(train)
