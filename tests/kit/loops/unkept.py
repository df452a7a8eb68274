"""A loop that keeps something outside of what it tracks, in the place that the first argument names.

Without one, what it keeps is only logged.
"""

import sys

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import shoal

HOW = sys.argv[1] if len(sys.argv) > 1 else "nothing"
STEPS, GLOBAL_SIZE, MICRO_SIZE, WIDTH = 6, 12, int(sys.argv[2]) if len(sys.argv) > 2 else 3, 8
GLOBAL = 0.0
total = 0


class Points(torch.utils.data.Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(5)
        self.x, self.y = (torch.randn(40, WIDTH, generator=generator) for _ in range(2))
        self.generator = torch.Generator().manual_seed(6)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        noise = torch.rand((), generator=self.generator) if HOW.startswith("data") else 0.0
        return self.x[index] + noise, self.y[index]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.line, self.scale, self.newest = nn.Linear(WIDTH, WIDTH), 1.0, None
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=False)
        self.register_buffer("cached", torch.zeros(0), persistent=False)

    def forward(self, x):
        y = self.line(x)
        if len(self.cached) < len(x):
            self.cached = torch.arange(float(len(x)))
        if HOW == "module":
            y = y * self.scale
            self.scale *= 0.9
        self.newest = y.detach().mean()  # to look at
        if HOW == "buffer":
            y = y + self.mean
            self.mean.lerp_(y.detach().mean(0), 0.5)
        return y


class Counting(torch.optim.Optimizer):
    """Its rate falls with a number that `state_dict` does not have."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})
        self.num_steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.num_steps += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=group["lr"] / self.num_steps)


class Saving(Counting):
    def state_dict(self):
        return {**super().state_dict(), "num_steps": self.num_steps}

    def load_state_dict(self, state):
        self.num_steps = state["num_steps"]
        super().load_state_dict({key: value for key, value in state.items() if key != "num_steps"})


class Listing(Counting):
    """Keeps its rates in a dict."""

    def __init__(self, parameters):
        super().__init__(parameters)
        self.rates = {"all": 0.1}

    @torch.no_grad()
    def step(self, closure=None):
        self.rates["all"] *= 0.9
        self.param_groups[0]["lr"] = self.rates["all"]
        super().step()


class Kept:
    def __init__(self):
        self.value = 0.0

    def used(self, loss):
        grown = loss * (1 + self.value)
        self.value += 0.1
        return grown


def change_gradients(model, is_last, step):
    if HOW == "clip_late" and is_last and step >= 3:
        clip_grad_norm_(model.parameters(), 0.1)
    if HOW == "clip" or (HOW == "clip_once" and is_last):
        clip_grad_norm_(model.parameters(), 0.1)
    if not is_last:
        return
    if HOW == "clip_value":
        clip_grad_value_(model.parameters(), 0.01)
    if HOW == "clip_by_hand":
        norm = torch.stack([one.grad.norm() for one in model.parameters()]).norm()
        for one in model.parameters():
            one.grad.mul_(min(1.0, 0.1 / float(norm)))
    if HOW == "centred":
        for one in (model.line.weight,):
            one.grad.sub_(one.grad.mean(1, keepdim=True))
    if HOW == "scaled":
        for one in model.parameters():
            one.grad.mul_(0.5)
            one.grad[0] = 0.0


def global_loss(loss):
    global GLOBAL
    GLOBAL = 0.5 * GLOBAL + 0.1 * float(loss.detach())
    return loss * (1 + GLOBAL)


def train(run):
    global total
    torch.manual_seed(0)
    model = Net()
    kind = {"optimizer": Counting, "saving": Saving, "listed": Listing}.get(HOW)
    optimizer = torch.optim.SGD(model.parameters(), 0.1) if kind is None else kind(model.parameters())
    run.track(model=model, optimizer=optimizer)
    number, center, count, kept, rows = 0.0, torch.zeros(WIDTH), 0, Kept(), []
    running, best, rate = 0.0, 1e9, 0.1
    if HOW == "recomputed":
        number = 0.5**run.step
    noise, offsets, teacher = torch.Generator(), (0.1 * n for n in range(99)), nn.Linear(WIDTH, WIDTH)
    if HOW != "iterator":
        offsets = None
    size = {"micro_size": MICRO_SIZE} | ({"num_workers": 1} if HOW == "data_processes" else {})
    for num, (x, y) in enumerate(run.batches(Points(), global_size=GLOBAL_SIZE, **size), 1):
        if run.step == STEPS:
            break
        if HOW == "zero":
            optimizer.zero_grad()
        made = model(x)
        loss = (made - y).square().mean()
        if HOW == "recomputed":
            loss = loss * (1 + number)
        if HOW == "seeded":
            noise.manual_seed(run.step)
            loss = loss * (1 + torch.rand((), generator=noise))
        if HOW == "number":
            loss = loss * (1 + number)
            number = 0.5 * number + 0.1 * float(loss.detach())
        if HOW == "tensor":
            loss = (made - y - center).square().mean()
            center.mul_(0.9).add_(made.detach().mean(0), alpha=0.1)
        if HOW == "object":
            loss = loss * (1 + kept.value)
            kept.value = 0.5 * kept.value + 0.1 * float(loss.detach())
        if HOW == "list":
            loss = loss * (1 + sum(rows[-2:]))
            rows.append(0.1 * float(loss.detach()))
        if HOW == "count":
            count += 1
            if count > 5:
                loss = loss * 0.5
        if HOW == "generator":
            loss = loss * (1 + torch.rand((), generator=noise))
        if HOW == "iterator":
            loss = loss * (1 + next(offsets))
        if HOW == "method":
            loss = kept.used(loss)
        if HOW == "teacher":
            loss = loss + (made - teacher(x).detach()).square().mean()
        if HOW == "rate":
            optimizer.param_groups[0]["lr"] = rate
        if HOW == "global":
            loss = global_loss(loss)
        run.backward(loss, weight=len(x))
        running += float(loss.detach())
        total += len(x)
        change_gradients(model, num % -(-GLOBAL_SIZE // MICRO_SIZE // run.world_size) == 0, run.step)
        if run.steps(optimizer):
            rate *= 0.9 if HOW == "rate" else 1.0
            if HOW == "recomputed":
                number = 0.5**run.step
            with torch.no_grad():
                teacher.weight.lerp_(model.line.weight, 0.5 if HOW == "teacher" else 0.0)
            best = min(best, run.loss)
            run.log(running=running, best=best, total=total)


if __name__ == "__main__":
    shoal.run(train)
