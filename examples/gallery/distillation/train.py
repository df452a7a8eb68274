"""A student learns from a frozen teacher, and a moving average of the student is kept.

    shoal submit train.py --workers 1:4 --follow -- 500          also: python train.py, torchrun ... train.py

The teacher never changes, so it is not tracked: each life of the loop loads it anew. The average is tracked.
"""

import sys

import torch
from torch import nn
from torch.nn.functional import kl_div, log_softmax
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import shoal

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 500


class Points:
    def __init__(self):
        self.points = torch.randn(4096, 8, generator=torch.Generator().manual_seed(3))

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        return self.points[index]


def network(width):
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 5))


def train(run):
    torch.manual_seed(3)
    teacher = network(128).to(run.device).eval().requires_grad_(False)  # yours comes from a file
    student = network(16).to(run.device)
    average = AveragedModel(student, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    optimizer = torch.optim.AdamW(student.parameters(), lr=3e-3)
    run.track(student=student, average=average, optimizer=optimizer)
    for points in run.batches(Points(), global_size=32, micro_size=8):
        if run.step == STEPS:
            return
        taught, said = log_softmax(teacher(points), dim=-1), log_softmax(student(points), dim=-1)
        run.backward(kl_div(said, taught, log_target=True, reduction="batchmean"), weight=len(points))
        if run.steps(optimizer, clip=1.0):
            average.update_parameters(student)


if __name__ == "__main__":
    shoal.run(train)
