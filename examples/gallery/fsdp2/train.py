"""A transformer that is sharded over the workers with FSDP2, as a loop in place.

    shoal submit train.py --workers 2:4 --set parallelism.dp_shard=auto --follow -- 200
    python train.py, torchrun ... train.py                          unsharded: every process has the whole model

Each worker keeps its part of the parameters, the gradients and the optimizer's state. Another number of workers gets
other parts of the same state. Without `parallelism` in the spec `run.wrap` leaves the model as it is.
"""

import sys

import torch
from torch import nn

import shoal

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 200
LENGTH, LETTERS = 16, 11


class Counting:
    """Numbers that go up by the same distance, modulo LETTERS: the model predicts the next one."""

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        start, distance = index % LETTERS, index // LETTERS % 4 + 1
        line = (start + distance * torch.arange(LENGTH + 1)) % LETTERS
        return line[:-1], line[1:]


class Model(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.letters, self.places = nn.Embedding(LETTERS, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True) for _ in range(2)
        )
        self.scores = nn.Linear(width, LETTERS)

    def forward(self, x, y):
        hidden = self.letters(x) + self.places.weight
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=x.device)
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        return nn.functional.cross_entropy(self.scores(hidden).flatten(0, 1), y.flatten())


def train(run):
    torch.manual_seed(5)
    model = run.wrap(Model().to(run.device))  # or fully_shard(..., mesh=run.mesh), block by block
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
    run.track(model=model, optimizer=optimizer, schedule=schedule)
    for x, y in run.batches(Counting(), global_size=32, micro_size=8):
        if run.step == STEPS:
            return
        run.backward(model(x, y), weight=y.numel())
        if run.steps(optimizer, clip=1.0):
            schedule.step()


if __name__ == "__main__":
    shoal.run(train)
