"""Tasks whose samples say which process has read them, draw random numbers, or fail."""

import os
import random
import signal
from pathlib import Path

import numpy as np
import torch
from tiny_tasks import Counting, Sequences
from torch import nn


class Logged(Sequences):
    """A line `pid index` for each sample that is read, in `ledger`; and noise from all three generators."""

    def __init__(self, ledger, data, length):
        super().__init__(length, 29, 8)
        self.ledger, self.data = ledger, data

    def __getitem__(self, index):
        with Path(self.ledger).open("a") as file:
            file.write(f"{os.getpid()} {index}\n")
        sample = super().__getitem__(index)
        noise = int(torch.randint(3, ())) + int(np.random.randint(3)) + random.randrange(3)
        return (sample + noise) % 29


class Augmented(Counting):
    """The model draws too (dropout), after its samples."""

    def build_dataset(self, split):
        return Logged(self.data["ledger"], self.data, self.data.get("length", 50) if split == "train" else 11)


class Plain(Counting):
    """Its samples draw nothing."""

    def build_dataset(self, split):
        return LoggedOnly(self.data["ledger"], self.data, 50 if split == "train" else 11)


class LoggedOnly(Logged):
    def __getitem__(self, index):
        with Path(self.ledger).open("a") as file:
            file.write(f"{os.getpid()} {index}\n")
        return Sequences.__getitem__(self, index)


class Failing(Counting):
    """One sample cannot be read."""

    def build_dataset(self, split):
        return FailingSequences(self.data["bad"])


class FailingSequences(Sequences):
    def __init__(self, bad):
        super().__init__(50, 29, 8)
        self.bad = bad

    def __getitem__(self, index):
        if index == self.bad:
            raise ValueError(f"no picture {index}")
        return super().__getitem__(index)


class DyingReader(Counting):
    """The first read of one sample kills its process, as a lack of memory does."""

    def build_dataset(self, split):
        return DyingSequences(self.data["marker"], self.data["bad"])


class DyingSequences(Sequences):
    def __init__(self, marker, bad):
        super().__init__(50, 29, 8)
        self.marker, self.bad = Path(marker), bad

    def __getitem__(self, index):
        if index == self.bad and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class LateCollate(Counting):
    """Its collate needs what build_model has made."""

    def build_model(self):
        self.shift = 0
        return super().build_model()

    def collate(self, samples):
        return torch.stack(samples) + self.shift


class Unsendable(Counting):
    """A batch that no other process can be sent."""

    def collate(self, samples):
        return {"tokens": torch.stack(samples), "name": lambda: "a function"}

    def loss(self, model, batch):
        return super().loss(model, batch["tokens"])


class Large(Counting):
    """64 MiB of parameters more, all of which each step changes."""

    def build_model(self):
        return Wide(super().build_model())


class Wide(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.wide = nn.Linear(4096, 4096)

    def forward(self, tokens):
        return self.inner(tokens) + 0.001 * self.wide(torch.ones(1, 4096)).mean()


class OwnGenerator(Counting):
    """Its samples draw from a generator that nobody seeds for a micro-batch."""

    def build_dataset(self, split):
        return DrawnSequences(50 if split == "train" else 11, 29, 8)


class DrawnSequences(Sequences):
    def __init__(self, length, vocab, seq_len):
        super().__init__(length, vocab, seq_len)
        self.generator = np.random.default_rng(0)

    def __getitem__(self, index):
        return (super().__getitem__(index) + int(self.generator.integers(3))) % self.vocab


class Counted(Counting):
    """Every other sample that is read is another one, so each micro-batch is the same when it is read again."""

    def build_dataset(self, split):
        return CountedSequences(50 if split == "train" else 11, 29, 8)


class CountedSequences(Sequences):
    def __init__(self, length, vocab, seq_len):
        super().__init__(length, vocab, seq_len)
        self.num_read = 0

    def __getitem__(self, index):
        self.num_read += 1
        return (super().__getitem__(index) + self.num_read % 2) % self.vocab


class Seeded(Counting):
    """Its samples draw from torch's generator."""

    def build_dataset(self, split):
        return SeededSequences(50, 29, 8)


class SeededSequences(Sequences):
    def __getitem__(self, index):
        return (super().__getitem__(index) + int(torch.randint(3, ()))) % self.vocab


class OddCounts(Counting):
    """Its numbers of samples that are left out are no whole numbers."""

    def build_dataset(self, split):
        data = SeededSequences(50, 29, 8)
        data.left_out = {"a half": 0.5}
        return data
