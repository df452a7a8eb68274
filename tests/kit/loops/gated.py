"""The loop of digits.py, which stands still after step 6 until its gate opens, and which worker processes read for:
`gated.py GATE`."""

import sys
import time
from pathlib import Path

import digits
from torch import nn

import shoal

GATED = 6


def train(run):
    model, optimizer, schedule, average = digits.build()
    run.track(model=model, optimizer=optimizer, schedule=schedule, average=average)
    for x, y in run.batches(digits.Points(), global_size=digits.GLOBAL_SIZE, micro_size=3, num_workers=2):
        while run.step == GATED and not Path(sys.argv[1]).exists():
            time.sleep(0.02)
        if run.step == digits.STEPS:
            return
        run.backward(nn.functional.cross_entropy(model(x), y), weight=len(x))
        if run.steps(optimizer, clip=1.0):
            schedule.step()
            average.add(model)


shoal.run(train)
