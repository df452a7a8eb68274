"""A script that goes on from files in its working and its checkpoint directory: `swept.py GATES`, LR is its rate."""

import os
import sys
import time
from pathlib import Path

from tensorboardX import SummaryWriter

STEPS = 10
lr = float(os.environ["LR"])
weight = 1.0
files = (Path("last.txt"), Path(os.environ["SHOAL_CHECKPOINT_DIR"], "last.txt"))
print("found", *[file.read_text() for file in files if file.exists()], flush=True)
with SummaryWriter() as writer:
    for step in range(1, STEPS + 1):
        weight *= 1 - lr
        writer.add_scalar("loss", weight, step)
        for file in files:
            file.write_text(f"{lr} {step} {weight:.6f}")
        Path(sys.argv[1], str(lr)).touch()
        while step == STEPS // 2 and not Path(sys.argv[1], "open").exists():
            time.sleep(0.02)
print("has", *[file.read_text() for file in files], flush=True)
