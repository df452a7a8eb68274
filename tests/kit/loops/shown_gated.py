"""The loop of digits.py, which logs media in each step, and stands still in step 7, once it has logged them, until its
gate opens: `shown_gated.py GATE`. What is logged depends on the step and on the weights only."""

import sys
import time
from pathlib import Path

import digits
import torch
from torch import nn

import shoal

GATED = 7


def train(run):
    model, optimizer, schedule, average = digits.build()
    run.track(model=model, optimizer=optimizer, schedule=schedule, average=average)
    logged = 0
    for x, y in run.batches(digits.Points(), global_size=digits.GLOBAL_SIZE, micro_size=3):
        step = run.step + 1
        if step > digits.STEPS:
            return
        if step > logged:
            logged = step
            show(run, step, model)
        while step == GATED and not Path(sys.argv[1]).exists():
            time.sleep(0.02)
        run.backward(nn.functional.cross_entropy(model(x), y), weight=len(x))
        if run.steps(optimizer, clip=1.0):
            schedule.step()
            average.add(model)


def show(run, step, model):
    if run.rank == 0:
        run.log(
            images={"fade": torch.linspace(0, 1, 24 * 16).view(16, 24) * step / digits.STEPS},
            histogram={"head": model[3].weight},
            table={"facts": [{"step": step, "square": step * step, "name": f"row of {step}"}]},
            text={"words": f"this is step {step}"},
        )


shoal.run(train)
