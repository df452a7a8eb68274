"""Two models with an optimizer each: two updates of one to one of the other in every step."""

import torch
from torch import nn

import shoal

STEPS, GLOBAL_SIZE = 8, 12


class Ring:
    """Points on a circle."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        angle = torch.tensor(index * 0.1)
        return torch.stack([angle.cos(), angle.sin()])


def train(run):
    torch.manual_seed(1)
    maker = nn.Sequential(nn.Linear(3, 12), nn.Tanh(), nn.Linear(12, 2))
    judge = nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 1))
    of_maker = torch.optim.Adam(maker.parameters(), lr=0.02)
    of_judge = torch.optim.SGD(judge.parameters(), lr=0.05, momentum=0.9)
    run.track(maker=maker, judge=judge, of_maker=of_maker, of_judge=of_judge)

    def verdict(points, is_real):
        target = torch.full((len(points), 1), float(is_real))
        return nn.functional.binary_cross_entropy_with_logits(judge(points), target)

    for step in run.global_batches(Ring(), global_size=GLOBAL_SIZE):
        if run.step == STEPS:
            return
        for _ in range(2):
            for points in step:
                made = maker(torch.randn(len(points), 3)).detach()
                run.backward(verdict(points, True) + verdict(made, False))
            run.update(of_judge)
        for points in step:
            run.backward(verdict(maker(torch.randn(len(points), 3)), True))
        of_judge.zero_grad()
        run.update(of_maker)
        run.commit()


if __name__ == "__main__":
    shoal.run(train)
