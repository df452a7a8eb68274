"""A loop that fails in its second step: `mistaken.py [KIND]`, the name of an exception."""

import builtins
import sys

import torch

import shoal


def train(run):
    model = torch.nn.Linear(1, 1)
    run.track(model=model)
    run.commit()
    if run.step == 1:
        raise getattr(builtins, sys.argv[1] if len(sys.argv) > 1 else "ZeroDivisionError")


shoal.run(train)
