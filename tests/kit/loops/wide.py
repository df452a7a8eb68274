"""A model of several buckets, trained in the way that the first argument names: what a loop may do between a backward
pass and an update, beside the usual."""

import os
import signal
import sys

import torch
from torch import nn

import shoal

STEPS, GLOBAL_SIZE, WIDTH = 9, 12, 600


class Points:
    """Points in eight dimensions, and the sign of their sum."""

    def __init__(self):
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(40, 8, generator=generator)
        self.y = (self.x.sum(dim=1) > 0).long()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


class Model(nn.Module):
    """`odd` and `even` are used by some micro-batches only, `never` by none."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, WIDTH)
        self.odd, self.even = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(WIDTH, 3)
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x, both=False):
        hidden = self.first(x).tanh()
        if hidden.requires_grad:
            hidden.register_hook(at_the_end_of_backward)
        branches = [self.odd, self.even] if both else [self.odd if x[0, 0] > 0 else self.even]
        return self.last(sum(branch(hidden) for branch in branches).tanh())


def at_the_end_of_backward(_):
    if is_doomed():
        os.kill(os.getpid(), signal.SIGKILL)


def is_doomed():
    return False


def train(run):
    torch.manual_seed(0)
    how, model = sys.argv[1] if len(sys.argv) > 1 else "usual", Model()
    upper = [*model.odd.parameters(), *model.even.parameters(), *model.last.parameters(), *model.never.parameters()]
    of_all = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    of_lower = torch.optim.SGD(model.first.parameters(), lr=0.05, momentum=0.9)
    of_upper = torch.optim.AdamW(upper, lr=1e-3)
    run.track(model=model, of_all=of_all, of_lower=of_lower, of_upper=of_upper)

    def loss_of(batch, both=True):
        x, y = batch
        return nn.functional.cross_entropy(model(x, both), y)

    is_hooked = False

    def quarter(parameter):
        if is_hooked:
            parameter.grad.data.mul_(0.25)

    def killed():
        return how == "killed" and run.world_size == 3 and run.rank == 1 and run.step == 6

    globals()["is_doomed"] = killed
    if how == "gathered":
        for x, y in run.batches(Points(), global_size=GLOBAL_SIZE, micro_size=GLOBAL_SIZE // run.world_size):
            every = run.gather(model.first(x).tanh())
            near = model.odd(model.first(x).tanh()) @ every.T / WIDTH
            mine = torch.arange(len(x)) + run.rank * len(x)
            run.backward(nn.functional.cross_entropy(near, mine) + nn.functional.cross_entropy(model(x, True), y))
            if run.steps(of_all):
                seen(run)
                if run.step == STEPS:
                    return
    for batch in run.global_batches(Points(), global_size=GLOBAL_SIZE, micro_size=3):
        if run.step == STEPS:
            return
        if how == "switched":
            order = [of_lower, of_upper] if run.step % 9 < 5 else [of_upper, of_lower, of_upper]
            for optimizer in order if run.step != 7 else [of_lower]:
                for one in batch:
                    run.backward(loss_of(one))
                run.update(optimizer)
                (of_upper if optimizer is of_lower else of_lower).zero_grad()
            if run.step == 6:  # a gradient that no update follows
                for one in batch:
                    run.backward(loss_of(one))
                of_lower.zero_grad()
                of_upper.zero_grad()
                run.backward(0 * loss_of(next(iter(batch))), weight=0.0)
                of_lower.zero_grad()
                of_upper.zero_grad()
        else:
            for one in batch:
                run.backward(loss_of(one, both=how != "unused"), weight=len(one[0]))
                if how == "twice" or (how == "varied" and run.step % 3):
                    run.backward(loss_of(one).square(), weight=0.5)
                if how == "varied" and run.step == 7 and run.rank == 0:
                    run.backward(loss_of(one), weight=0.0)
            if how == "hooked":  # by a hook that is registered late, when the gradient of the step is complete
                if run.step == 3:
                    for parameter in model.parameters():
                        parameter.register_post_accumulate_grad_hook(quarter)
                is_hooked = True
                run.backward(loss_of(one), weight=0.0)
                is_hooked = False
            if how in ("touched", "touched_data") and run.step >= 5:
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        (parameter.grad if how == "touched" else parameter.grad.data).mul_(0.25)
            run.update(of_all, clip=0.5)
        seen(run)
        run.commit()


def seen(run):
    """How many buckets were sent during backward passes so far."""
    if run.world_size > 1:
        run.log(early=run._gradients.num_early)


if __name__ == "__main__":
    shoal.run(train)
