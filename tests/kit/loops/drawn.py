"""A loop as a description says, the first argument: JSON. tests/kit/fuzz/loops.py draws them.

It imports nothing of Shoal but `shoal.run`, so the plain reference runs the same file with a `run` of its own.
"""

import copy
import json
import random
import sys

import torch
from torch import nn
from torch.nn import functional

import shoal

STEPS, WIDTH, HIDDEN, CLASSES, CHANGED_AFTER = 6, 6, 8, 3, 2


class Points(torch.utils.data.Dataset):
    def __init__(self, num):
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(num, WIDTH, generator=generator)
        self.y = (self.x.sum(1) > 0).long() + (self.x[:, 0] > 0.5).long()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index], 1 + index % 4


class Turned(torch.utils.data.Sampler):
    """Another order in each epoch, which is known without random numbers."""

    def __init__(self, num):
        self.num, self.epoch = num, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.num

    def __iter__(self):
        return iter([(index + 5 * self.epoch) % self.num for index in range(self.num)])


class Net(nn.Module):
    def __init__(self, drawn):
        super().__init__()
        kind = drawn["model"]
        self.kind, self.step = kind, 0
        self.enter = {
            "convolution": lambda: nn.Conv1d(1, HIDDEN, 3, padding=1),
            "recurrent": lambda: nn.GRU(2, HIDDEN, batch_first=True),
            "embedding": lambda: nn.Embedding(16, HIDDEN, padding_idx=3),
        }.get(kind, lambda: nn.Linear(WIDTH, HIDDEN))()
        self.norm = {
            "none": nn.Identity,
            "batch": lambda: nn.BatchNorm1d(HIDDEN),
            "cumulative": lambda: nn.BatchNorm1d(HIDDEN, momentum=None),
            "layer": lambda: nn.LayerNorm(HIDDEN),
        }[drawn["norm"]]()
        self.dropout = nn.Dropout(drawn["dropout"])
        self.middle, self.leave = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, CLASSES)
        if kind == "frozen":
            self.enter.requires_grad_(False)
        if kind == "branches":
            self.other = nn.Linear(HIDDEN, HIDDEN)
        self.listed = [self.middle.weight]
        self.buffer = drawn["buffer"]
        if self.buffer != "none":
            self.register_buffer("average", torch.zeros(drawn["buffer_size"]))
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        hidden = self.norm(self.entered(x))
        hidden = self.dropout(torch.tanh(hidden))
        if self.kind == "shared":
            hidden = self.middle(torch.tanh(self.middle(hidden)))
        elif self.kind == "listed":
            hidden = self.middle(hidden) + functional.linear(hidden, self.listed[0])
        elif self.kind == "branches" and float(x[0, 0]) > 0:
            hidden = self.other(hidden)
        elif self.kind == "late" and self.step < 3:
            pass
        else:
            hidden = self.middle(hidden)
        if self.buffer != "none":
            hidden = hidden + self.average[-1]
            if self.training:
                self.change(hidden.detach().mean())
        return self.leave(hidden)

    def entered(self, x):
        if self.kind == "convolution":
            return self.enter(x[:, None]).mean(2)
        if self.kind == "recurrent":
            return self.enter(x.view(-1, 3, 2))[0][:, -1]
        if self.kind == "embedding":
            return self.enter((x * 4).long().clamp(-8, 7) + 8).mean(1)
        return self.enter(x)

    def change(self, mean):
        self.count += 1
        if self.buffer == "in_place":
            self.average.mul_(0.9).add_(mean, alpha=0.1)
        elif self.buffer == "data":
            self.average.data[-1:] = 0.9 * self.average.data[-1:] + 0.1 * mean
        elif self.buffer == "data_assigned":
            self.average.data = 0.9 * self.average + 0.1 * mean
        else:
            self.average = 0.9 * self.average + 0.1 * mean


class OwnOptimizer(torch.optim.Optimizer):
    """Follows the sign of a moving average, and reads an attribute of the parameter."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state.setdefault("average", torch.zeros_like(parameter)).lerp_(parameter.grad, 0.3)
                    state["count"] = state.get("count", 0) + 1
                    scale = getattr(parameter, "lr_scale", 1.0) / state["count"]
                    parameter.add_(state["average"], alpha=-group["lr"] * scale)


class Average:
    def __init__(self, model):
        self.values = {name: value.detach().clone() for name, value in model.named_parameters()}

    def update_parameters(self, model):
        for name, value in model.named_parameters():
            self.values[name].lerp_(value.detach(), 0.1)

    def state_dict(self):
        return {"values": self.values}

    def load_state_dict(self, state):
        self.values = state["values"]


class ByAttribute:
    """A number that follows the loss, kept in an attribute."""

    def __init__(self):
        self.number = 0.0

    def get(self):
        return self.number

    def follow(self, loss):
        self.number = 0.5 * self.number + 0.1 * loss

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.number = state["number"]


class ByList(ByAttribute):
    def __init__(self):
        self.numbers = [0.0, 0.0]

    def get(self):
        return sum(self.numbers)

    def follow(self, loss):
        self.numbers.append(0.1 * loss)
        self.numbers.pop(0)

    def state_dict(self):
        return {"numbers": list(self.numbers)}

    def load_state_dict(self, state):
        self.numbers = state["numbers"]


class ByTensor(ByAttribute):
    """In a tensor that is written through `data`."""

    def __init__(self):
        self.number = torch.zeros(())

    def get(self):
        return float(self.number)

    def follow(self, loss):
        self.number.data = 0.5 * self.number + 0.1 * loss

    def load_state_dict(self, state):
        self.number = state["number"]


def by_closure():
    number = 0.0

    class ByClosure(ByAttribute):
        def __init__(self):
            pass

        def get(self):
            return number

        def follow(self, loss):
            nonlocal number
            number = 0.5 * number + 0.1 * loss

        def state_dict(self):
            return {"number": number}

        def load_state_dict(self, state):
            nonlocal number
            number = state["number"]

    return ByClosure()


STATES = {"attribute": ByAttribute, "list": ByList, "closure": by_closure, "data": ByTensor}


def optimizer_of(drawn, model):
    trained = [one for one in model.parameters() if one.requires_grad]
    for one in trained:
        one.lr_scale = 0.5 if one.ndim < 2 else 1.0
    groups = [{"params": trained}]
    if drawn["groups"] == "by_dim":
        groups = [{"params": [one for one in trained if one.ndim >= 2]}]
        groups += [{"params": [one for one in trained if one.ndim < 2], "lr": 0.5 * drawn["lr"]}]
    if drawn["order"] == "shuffled":  # as that of a set is, in each process
        for group in groups:
            random.SystemRandom().shuffle(group["params"])
    match drawn["optimizer"]:
        case "momentum":
            return torch.optim.SGD(groups, drawn["lr"], momentum=0.9, nesterov=True)
        case "adamw":
            return torch.optim.AdamW(groups, drawn["lr"], eps=1e-3)
        case "amsgrad":
            return torch.optim.Adam(groups, drawn["lr"], eps=1e-3, amsgrad=True)
        case "rmsprop":
            return torch.optim.RMSprop(groups, drawn["lr"], eps=1e-2, centered=True)
        case "adagrad":
            return torch.optim.Adagrad(groups, drawn["lr"], eps=1e-2)
        case "own":
            return OwnOptimizer(groups, drawn["lr"])
    return torch.optim.SGD(groups, drawn["lr"])


def schedule_of(drawn, optimizer):
    schedulers = torch.optim.lr_scheduler
    match drawn["schedule"]:
        case "step":
            return schedulers.StepLR(optimizer, 2, 0.5)
        case "cosine":
            return schedulers.CosineAnnealingLR(optimizer, STEPS)
        case "one_cycle":
            return schedulers.OneCycleLR(optimizer, 2 * drawn["lr"], total_steps=STEPS + 1, cycle_momentum=False)
        case "chained":
            first = schedulers.LinearLR(optimizer, 0.5, total_iters=2)
            return schedulers.SequentialLR(optimizer, [first, schedulers.ExponentialLR(optimizer, 0.8)], [3])
        case "plateau":
            return schedulers.ReduceLROnPlateau(optimizer, patience=0, threshold=0.05, factor=0.5)
        case "lambda":
            return schedulers.LambdaLR(optimizer, lambda step: 0.9**step)
    return None


class Loop:
    """What a description has, and what it does in a step."""

    def __init__(self, run, drawn):
        self.run, self.drawn = run, drawn
        self.data = Points(drawn["num_samples"])
        self.held_out = Points(5)
        self.net = Net(drawn)
        self.optimizer = optimizer_of(drawn, self.net)
        self.head = nn.Parameter(torch.ones(CLASSES), requires_grad=drawn["misplaced"] == "head")
        if drawn["misplaced"] == "head":
            self.optimizer.param_groups[0]["params"].append(self.head)
        self.net.leave.bias.requires_grad_(drawn["late"] != "unfrozen")
        self.schedule = schedule_of(drawn, self.optimizer)
        self.state = None if drawn["state"] == "none" else STATES[drawn["state"]]()
        self.average = None
        if drawn["average"] == "own":
            self.average = Average(self.net)
        elif drawn["average"] == "averaged_model":
            rule = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
            self.average = torch.optim.swa_utils.AveragedModel(copy.deepcopy(self.net), multi_avg_fn=rule)
        self.maker = self.of_maker = None
        if drawn["updates"] == "gan":
            self.maker = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.Linear(HIDDEN, WIDTH))
            self.of_maker = optimizer_of(drawn, self.maker)
        names = ("net", "optimizer", "schedule", "state", "average", "maker", "of_maker")
        run.track(**{name: one for name in names if (one := getattr(self, name)) is not None})

    def backward(self, batch):
        x, y, counts = batch
        self.net.step = self.run.step
        weight = {"none": 1.0, "len": float(len(x)), "counts": float(counts.sum())}[self.drawn["weight"]]
        each = functional.cross_entropy(self.net(x) * self.head, y, reduction="none")
        loss = (each * counts).sum() / counts.sum() if self.drawn["weight"] == "counts" else each.mean()
        if self.state is not None:
            loss = loss * (1 + self.state.get())
        if self.drawn["updates"] == "two_backward":
            penalty = 0.01 * sum(one.square().sum() for one in self.net.parameters() if one.requires_grad)
            self.run.backward(loss, weight=weight)
            self.run.backward(penalty, weight=weight)
        else:
            self.run.backward(loss, weight=weight)
        match self.drawn["misplaced"]:
            case "step":
                self.optimizer.step()
            case "state":
                self.state.follow(float(loss.detach()))

    def change_gradients(self):
        kind = self.drawn["gradient"]
        if kind == "none" or (kind.startswith("late") and self.run.step < 3):
            return
        for one in self.net.parameters():
            if one.grad is not None:
                (one.grad.data if kind.endswith("data") else one.grad).mul_(0.5)

    def after(self):
        """What belongs to a step beside its update."""
        run = self.run
        if run.step == CHANGED_AFTER:
            self.change()
        if self.drawn["noise"]:
            with torch.no_grad():
                for one in self.net.parameters():
                    one.add_(torch.randn_like(one), alpha=0.01)
        if self.state is not None:
            self.state.follow(run.loss)
        if self.average is not None:
            self.average.update_parameters(self.net)
        if self.schedule is not None and not self.drawn["by_epoch"]:
            self.step_schedule()
        numbers = {"rate": self.optimizer.param_groups[-1]["lr"]}
        if self.state is not None:
            numbers["state"] = self.state.get()
        if self.drawn["evaluation"] == "steps" and run.step % 2 == 0:
            numbers["evaluated"] = self.evaluated()
        run.log(**numbers)

    def change(self):
        match self.drawn["late"]:
            case "unfrozen":
                self.net.leave.bias.requires_grad_(True)
            case "evaluating":
                self.net.norm.eval()
            case "dropout":
                self.net.dropout.p = 0.0

    def step_schedule(self):
        if self.drawn["schedule"] == "plateau":
            self.schedule.step(self.run.loss)
        else:
            self.schedule.step()

    @torch.no_grad()
    def evaluated(self):
        self.net.eval()
        x, y, _ = torch.utils.data.default_collate([self.held_out[index] for index in range(5)])
        loss = float(functional.cross_entropy(self.net(x), y))
        self.net.train()
        return loss

    def end_epoch(self):
        if self.schedule is not None and self.drawn["by_epoch"]:
            self.step_schedule()
        if self.drawn["evaluation"] == "epochs":
            self.run.log(evaluated=self.evaluated())

    def sizes(self):
        micro = self.drawn["micro_size"]
        return {"global_size": micro * self.drawn["num_micro_batches"], "micro_size": micro}

    def loader(self, size):
        return torch.utils.data.DataLoader(self.data, batch_size=size, sampler=Turned(len(self.data)))

    def train_on_batches(self, batches):
        """One update for each step."""
        for batch in batches:
            self.backward(batch)
            if self.run.steps(self.optimizer, clip=self.drawn["clip"]):
                self.after()
                if self.drawn["end"] == "break" and self.run.step == STEPS:
                    break
                if self.drawn["end"] == "agree" and self.run.agree(self.run.rank == 0 and self.run.step == STEPS):
                    break
            elif self.drawn["misplaced"] == "schedule":
                self.schedule.step()

    def train_on_passes(self):
        for batch in self.run.global_batches(self.data, **self.sizes()):
            if self.run.step == STEPS:
                return
            for one in batch:
                self.backward(one)
            self.change_gradients()
            self.run.update(self.optimizer, clip=self.drawn["clip"])
            self.after()
            self.run.commit()

    def train_maker(self):
        for batch in self.run.global_batches(self.data, **self.sizes()):
            if self.run.step == STEPS:
                return
            for x, _, _ in batch:
                real, made = self.net(x)[:, 0], self.net(self.maker(torch.randn_like(x)).detach())[:, 0]
                self.run.backward(functional.softplus(-real).mean(), weight=len(x))
                self.run.backward(functional.softplus(made).mean(), weight=len(x))
            self.run.update(self.optimizer, clip=self.drawn["clip"])
            for x, _, _ in batch:
                made = self.net(self.maker(torch.randn_like(x)))[:, 0]
                self.run.backward(functional.softplus(-made).mean(), weight=len(x))
            self.run.update(self.of_maker)
            self.optimizer.zero_grad()
            self.after()
            self.run.commit()

    def train(self):
        drawn, run = self.drawn, self.run
        if run.step >= STEPS:
            return
        if drawn["updates"] == "gan":
            self.train_maker()
        elif drawn["data"] == "global_batches":
            self.train_on_passes()
        elif drawn["data"].startswith("epochs"):
            size, micro = self.sizes()["global_size"], drawn["micro_size"]
            for _ in run.epochs(drawn["num_epochs"]):
                if drawn["data"] == "epochs":
                    self.train_on_batches(run.batches(self.loader(size), micro_size=micro))
                else:
                    self.train_on_batches(run.batches(self.data, **self.sizes()))
                self.end_epoch()
        elif drawn["data"] == "loader":
            loader = self.loader(drawn["micro_size"])
            self.train_on_batches(run.batches(loader, global_size=self.sizes()["global_size"]))
        else:
            self.train_on_batches(run.batches(self.data, **self.sizes()))


def train(run):
    torch.manual_seed(1)
    Loop(run, json.loads(sys.argv[1])).train()


if __name__ == "__main__":
    shoal.run(train)
