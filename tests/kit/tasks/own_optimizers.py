"""Optimizers as users write them; only some update each element on its own."""

import torch
from tiny_tasks import Counting
from torch.optim import SGD, AdamW, Optimizer


class Lion(Optimizer):
    """Elementwise, with a group setting that is a tuple."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["average"] = torch.zeros_like(parameter)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                direction = state["average"].mul(first).add(parameter.grad, alpha=1 - first).sign_()
                parameter.add_(direction, alpha=-group["lr"])
                state["average"].lerp_(parameter.grad, 1 - second)


class Clipped(SGD):
    """Clips each gradient by its own norm, which small gradients never show."""

    def step(self, closure=None):
        for parameter in (one for group in self.param_groups for one in group["params"] if one.grad is not None):
            parameter.grad.mul_(min(1.0, 1e6 / (float(parameter.grad.norm()) + 1e-6)))
        return super().step(closure)


class Counted(SGD):
    """Elementwise, but the number of its steps is in no state."""

    def __init__(self, params, lr):
        super().__init__(params, lr=lr)
        self.count = 0

    def step(self, closure=None):
        self.count += 1
        for group in self.param_groups:
            group["lr"] = group["lr"] / self.count
        return super().step(closure)


class Remembering(SGD):
    """Divides by an average of norms, which it keeps in a tensor of its own."""

    def __init__(self, params, lr):
        super().__init__(params, lr=lr)
        self.norm = torch.ones(())

    def step(self, closure=None):
        first = self.param_groups[0]["params"][0].grad
        self.norm.mul_(0.5).add_(0.5 + 0.5 * float(first.norm()))
        for group in self.param_groups:
            group["lr"] = group["lr"] / float(self.norm)
        return super().step(closure)


class Assigning(Optimizer):
    """Gives each parameter new memory in each step."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in (one for one in group["params"] if one.grad is not None):
                parameter.data = parameter.data - group["lr"] * parameter.grad


class HeavyBall(Assigning):
    """Keeps the memory that it has taken from a parameter."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in (one for one in group["params"] if one.grad is not None):
                previous = self.state[parameter].get("previous", parameter.data)
                self.state[parameter]["previous"] = parameter.data
                parameter.data = parameter.data - group["lr"] * parameter.grad + 0.5 * (parameter.data - previous)


class History(SGD):
    """Its state of each parameter grows until it has the last three norms."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in (one for one in group["params"] if one.grad is not None):
                norms = self.state[parameter].get("norms", torch.zeros(0))
                self.state[parameter]["norms"] = torch.cat([norms, parameter.grad.norm().reshape(1)])[-3:]
                parameter.grad.div_(1 + self.state[parameter]["norms"].mean())
        return super().step(closure)


class Anchored(SGD):
    """Draws each parameter to where it began."""

    def __init__(self, params, lr):
        super().__init__(params, lr=lr)
        self.anchors = [one.detach().clone() for group in self.param_groups for one in group["params"]]

    def step(self, closure=None):
        for parameter, anchor in zip(self.param_groups[0]["params"], self.anchors, strict=True):
            if parameter.grad is not None:
                parameter.grad.add_(parameter.detach() - anchor, alpha=0.1)
        return super().step(closure)


class Factored(Optimizer):
    """A second moment by rows and columns, of matrices of more than 100 rows and columns."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in (one for one in group["params"] if one.grad is not None):
                square = parameter.grad.square()
                if parameter.ndim == 2 and min(parameter.shape) > 100:
                    square = square.mean(0, keepdim=True) * square.mean(1, keepdim=True)
                parameter.addcdiv_(parameter.grad, square.sqrt() + 1e-6, value=-group["lr"])


class Own(Counting):
    """An optimizer of this module, by name, without a word about it."""

    def build_optimizer(self, model, settings):
        kind = globals()[self.model["optimizer"]]
        return kind(model.parameters(), lr=settings["lr"] / 10)


class Denied(Own):
    elementwise_optimizer = False


class Orthogonal(Counting):
    """torch's Muon of every matrix."""

    def build_optimizer(self, model, settings):
        return torch.optim.Muon([one for one in model.parameters() if one.ndim == 2], lr=settings["lr"])


class OrthogonalByShard(Orthogonal):
    """What is said of it is wrong: shards are orthogonalised one by one."""

    elementwise_optimizer = True


class Promised(Own):
    elementwise_optimizer = True


class Keeping(Counting):
    """Ends the job unless the optimizer that it has built is the one that trains."""

    def build_optimizer(self, model, settings):
        self.optimizer = SGD(model.parameters(), lr=settings["lr"], momentum=0.9)
        return self.optimizer

    def loss(self, model, batch):
        assert self.optimizer.param_groups[0]["lr"] <= self.optimizer.param_groups[0].get("initial_lr", 1.0)
        return super().loss(model, batch)


class TensorRate(Counting):
    """An AdamW of torch whose rate is a tensor."""

    def build_optimizer(self, model, settings):
        return AdamW(model.parameters(), lr=torch.tensor(settings["lr"]), amsgrad=True)
