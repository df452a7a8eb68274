"""Two sharded models, two updates of one for each update of the other, and two forward passes before a backward."""

import sys

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

import shoal

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 500


class Ring:
    """Points on a circle."""

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        angle = torch.tensor(2 * torch.pi * index / len(self))
        return torch.stack([angle.cos(), angle.sin()])


def train(run):
    torch.manual_seed(1)
    maker = run.wrap(nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 2)).to(run.device))
    judge = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1)).to(run.device)
    judge = run.wrap(judge, blocks=[judge[0], judge[2]])
    of_maker = torch.optim.Adam(maker.parameters(), lr=2e-3)
    of_judge = torch.optim.SGD(judge.parameters(), lr=0.05, momentum=0.9)
    run.track(maker=maker, judge=judge, of_maker=of_maker, of_judge=of_judge)

    def made(points):
        return maker(torch.randn(len(points), 3, device=run.device))

    def verdict(points, is_real):
        scores = judge(points)
        return cross_entropy(scores, torch.full_like(scores, float(is_real)))

    for step in run.global_batches(Ring(), global_size=32, micro_size=8):
        if run.step == STEPS:
            return
        for _ in range(2):
            for points in step:  # each pass has random numbers of its own
                run.backward(verdict(points, True) + verdict(made(points).detach(), False), weight=len(points))
            run.update(of_judge)
        for points in step:
            run.backward(verdict(made(points), True), weight=len(points))
        of_judge.zero_grad()  # the maker's pass has left gradients in the judge too
        run.update(of_maker)
        run.commit()


if __name__ == "__main__":
    shoal.run(train)
