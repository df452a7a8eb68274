"""accelerate's `Accelerator` in a loop in place: a killed worker costs one step at most.

    shoal submit train.py --workers 1:4 --follow -- 200          also: python train.py

The Accelerator is kept for what it does within a process: devices, mixed precision, `prepare`. It takes its process for
the only one, so the samples, the sum of the gradients and `gather` are those of `run`.
"""

import sys

import torch
from accelerate import Accelerator

import shoal

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 200


def train(run):
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=run.device.type == "cpu")
    x = torch.randn(2048, 8)
    data = torch.utils.data.TensorDataset(x, x.pow(2).sum(1, keepdim=True).sqrt())
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    run.track(model=accelerator.unwrap_model(model), optimizer=optimizer, schedule=schedule)
    for x, y in run.batches(data, global_size=32, micro_size=8):  # instead of a prepared loader
        if run.step == STEPS:
            return
        with accelerator.autocast():
            loss = torch.nn.functional.mse_loss(model(x), y)
        run.backward(loss, weight=len(x))  # instead of accelerator.backward(loss)
        if run.steps(optimizer, clip=1.0):  # instead of clip_grad_norm_, optimizer.step(), zero_grad()
            schedule.step()


if __name__ == "__main__":
    shoal.run(train)
