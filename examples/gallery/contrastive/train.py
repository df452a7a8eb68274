"""Each sample against those of all ranks: the loss of a rank depends on what the others have computed.

    shoal submit train.py --workers 1:4 --follow -- 500          also: python train.py, torchrun ... train.py

`run.gather` has gradients, so this is the loss over the global batch at every number of workers. Each rank has one
micro-batch, so that the global batch is gathered at once.
"""

import sys

import torch
from torch import nn

import shoal

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 500
GLOBAL_SIZE = 24  # can be divided by 1, 2, 3 and 4 workers


class Views:
    """Two noisy views of a point."""

    def __init__(self):
        random = torch.Generator().manual_seed(2)
        points = torch.randn(2048, 1, 8, generator=random)
        self.views = points + 0.1 * torch.randn(2048, 2, 8, generator=random)

    def __len__(self):
        return len(self.views)

    def __getitem__(self, index):
        return self.views[index]


def train(run):
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 16)).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run.track(model=model, optimizer=optimizer)
    for views in run.batches(Views(), global_size=GLOBAL_SIZE, micro_size=GLOBAL_SIZE // run.world_size):
        if run.step == STEPS:
            return
        left, right = nn.functional.normalize(model(views), dim=-1).unbind(1)
        every = run.gather(right)  # also the negatives of the other ranks
        mine = torch.arange(len(left), device=run.device) + run.rank * len(left)
        run.backward(nn.functional.cross_entropy(10 * left @ every.T, mine), weight=len(left))
        run.steps(optimizer)


if __name__ == "__main__":
    shoal.run(train)
