"""Each sample against those of all ranks: the loss of a rank depends on what the others have computed. Its loop catches
every Exception, as some do."""

import torch
from torch import nn

import shoal

STEPS, GLOBAL_SIZE = 8, 12


class Pairs:
    """Two views of a point."""

    def __len__(self):
        return 36

    def __getitem__(self, index):
        point = torch.tensor([index * 0.3, index % 5]).sin()
        return point, point + 0.1


def train(run):
    torch.manual_seed(2)
    model = nn.Linear(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for left, right in run.batches(Pairs(), global_size=GLOBAL_SIZE, micro_size=GLOBAL_SIZE // run.world_size):
        try:
            every = run.gather(model(right))
            mine = torch.arange(len(left)) + run.rank * len(left)
            run.backward(nn.functional.cross_entropy(model(left) @ every.T, mine))
            if run.steps(optimizer) and run.step == STEPS:
                return
        except Exception:
            continue


if __name__ == "__main__":
    shoal.run(train)
