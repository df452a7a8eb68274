"""Small loops that are written in the way that the first argument names; the second one has a buffer of that size.

two_backwards    real and made samples, a backward pass each, and one update
two_updates      an update of the judge and one of the maker in each micro-batch, of which each rank has one; in one
                 process two passes over the micro-batches
queue            a forward pass writes a buffer through `data`
plateau          a schedule and an early end that are decided by run.loss
agreed           rank 0 decides when to end, and run.agree tells the others
alone            the last rank leaves by itself
joint            a SyncBatchNorm; each rank has one micro-batch of a step, and in one process it has all of it
unequal          run.gather of tensors of different lengths
misfit           run.gather of tensors of different widths
own_rate         each rank sets the learning rate by its own loss
own_decay        a rank sets the weight decay alone, after what was proven
scaled           a GradScaler
"""

import sys

import torch
from torch import nn

import shoal

STEPS, GLOBAL_SIZE, WIDTH = 6, 12, 8


class Points:
    def __init__(self):
        generator = torch.Generator().manual_seed(5)
        self.x, self.z = (torch.randn(40, WIDTH, generator=generator) for _ in range(2))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.z[index]


class Queue(nn.Module):
    """Adds the mean of what it has seen, which it writes without torch's knowledge."""

    def __init__(self, size):
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("kept", torch.zeros(size))

    def forward(self, x):
        y = self.line(x) + self.kept[-1:].sum()
        self.kept.data[-1:] = 0.5 * self.kept[-1:] + y.detach().mean()
        return y


class Joint(nn.SyncBatchNorm):
    """That of torch needs a GPU."""

    def __init__(self, run):
        super().__init__(8)
        self.run = run

    def forward(self, x):
        every = self.run.gather(x)
        self.num_batches_tracked += 1
        every = nn.functional.batch_norm(every, self.running_mean, self.running_var, self.weight, self.bias, True)
        return every[self.run.rank * len(x) :][: len(x)]


def train(run):
    how, size = sys.argv[1] if len(sys.argv) > 1 else "two_backwards", int(sys.argv[2]) if len(sys.argv) > 2 else 1
    torch.manual_seed(0)
    last = Queue(size) if how == "queue" else nn.Linear(WIDTH, WIDTH)
    norm = Joint(run) if how == "joint" else nn.BatchNorm1d(8)
    maker = nn.Sequential(nn.Linear(WIDTH, 8), norm, nn.Tanh(), last)
    judge = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1))
    of_maker, of_judge = torch.optim.SGD(maker.parameters(), 0.1), torch.optim.SGD(judge.parameters(), 0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(of_judge, patience=0, threshold=0.05, factor=0.5)
    run.track(maker=maker, judge=judge, of_maker=of_maker, of_judge=of_judge, plateau=plateau)
    scaler = torch.amp.GradScaler("cpu", enabled=how == "scaled")

    if how == "two_updates":
        two_updates(run, maker, judge, of_maker, of_judge)
        return
    if how in ("unequal", "misfit"):
        own = torch.full((run.rank + 1, 2 + (how == "misfit") * run.rank), 1.0 + run.rank, requires_grad=True)
        every = run.gather(own)
        (every * torch.arange(len(every))[:, None]).sum().backward()
        run.log(rows=len(every), total=every.sum(), gradient=own.grad.sum())
    for x, z in run.batches(
        Points(), global_size=GLOBAL_SIZE, micro_size=12 // run.world_size if how == "joint" else 3
    ):
        if run.step == STEPS or (how == "alone" and run.step == 3 and run.rank == run.world_size - 1):
            return
        made = maker(z)
        run.backward(scaler.scale(loss_of(judge, x, True)), weight=len(x))
        run.backward(loss_of(judge, made.detach(), False), weight=len(x))
        if run.steps(of_judge):
            of_maker.zero_grad()
            if how == "own_rate" and run.rank == 0:
                of_judge.param_groups[0]["lr"] *= 0.5
            if how == "own_decay" and run.rank == 0 and run.step == 3:
                of_judge.param_groups[0]["weight_decay"] = 0.5
            if how == "plateau":
                plateau.step(run.loss)
            log(run, maker, of_judge)
            if (how == "plateau" and run.loss < 1.3) or run.agree(how == "agreed" and run.rank == 0 and run.step == 4):
                return


def loss_of(judge, points, is_real):
    verdict = judge(points)
    return nn.functional.binary_cross_entropy_with_logits(verdict, torch.full_like(verdict, float(is_real)))


def two_updates(run, maker, judge, of_maker, of_judge):
    def judged(x, z):
        run.backward(loss_of(judge, x, True) + loss_of(judge, maker(z).detach(), False), weight=len(x))

    def made(x, z):
        run.backward(loss_of(judge, maker(z), True), weight=len(x))

    if run.world_size == 1:
        for batch in run.global_batches(Points(), global_size=GLOBAL_SIZE, micro_size=6):
            if run.step == STEPS:
                return
            for turn, optimizer in ((judged, of_judge), (made, of_maker)):
                for one in batch:
                    turn(*one)
                run.update(optimizer)
            of_judge.zero_grad()
            log(run, maker, of_judge)
            run.commit()
    for x, z in run.batches(Points(), global_size=GLOBAL_SIZE, micro_size=6):
        if run.step == STEPS:
            return
        for turn, optimizer in ((judged, of_judge), (made, of_maker)):
            turn(x, z)
            run.update(optimizer)
        of_judge.zero_grad()
        log(run, maker, of_judge)
        run.commit()


def log(run, maker, optimizer):
    """Each buffer as one number, and the largest difference of buffers between two ranks."""
    numbers = {"b_" + name.replace(".", "_"): value.double().sum() for name, value in maker.named_buffers()}
    every = run.gather(torch.stack([*numbers.values()])[None])
    spread = float((every.max(0).values - every.min(0).values).max())
    run.log(rate=optimizer.param_groups[0]["lr"], spread=spread, **numbers)


if __name__ == "__main__":
    shoal.run(train)
