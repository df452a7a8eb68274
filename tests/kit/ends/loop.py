"""A loop that ends after its eighth step, as the variable END says."""

import ends
import torch

import shoal


def train(run):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for (x,) in run.batches(torch.utils.data.TensorDataset(torch.ones(16, 2)), global_size=4, micro_size=2):
        if run.step == 8:
            ends.here(run.rank)
        run.backward(model(x).square().mean())
        run.steps(optimizer)


shoal.run(train)
