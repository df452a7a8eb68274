"""A program of one process that does not know Shoal: it saves every now and then, and writes TensorBoard's files.

    python train.py                                       without a service
    shoal submit --follow -- python train.py              killed, it goes on from its last checkpoint

`--out` is where the checkpoint is: under Shoal a directory that lasts, in $SHOAL_CHECKPOINT_DIR. The curves come from
the event files.
"""

import argparse
import os
from pathlib import Path

import torch
from tensorboardX import SummaryWriter  # or torch.utils.tensorboard

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=6_000)
parser.add_argument("--out", type=Path, default=os.environ.get("SHOAL_CHECKPOINT_DIR", "."))
options = parser.parse_args()

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
writer = SummaryWriter("runs/norms", flush_secs=1)
last, done = options.out / "last.pt", 0
if last.exists():
    saved = torch.load(last)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    done = saved["step"]

for step in range(done + 1, options.steps + 1):
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
    loss = torch.nn.functional.mse_loss(model(x), x.pow(2).sum(1, keepdim=True).sqrt())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        writer.add_scalar("train/loss", loss.item(), step)
        writer.add_scalar("train/lr", optimizer.param_groups[0]["lr"], step)
    if step % 500 == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, f"{last}.new")
        Path(f"{last}.new").replace(last)  # never half a checkpoint
writer.close()
