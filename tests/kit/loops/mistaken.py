"""A loop that fails in its second step."""

import torch

import shoal


def train(run):
    model = torch.nn.Linear(1, 1)
    run.track(model=model)
    run.commit()
    print(1 / (run.step - 1))


shoal.run(train)
