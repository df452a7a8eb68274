"""Tasks of which some parameters get their first gradient late, or never; they import nothing from Shoal but the order
of samples, by which a sample knows the step that reads it."""

import torch
from tiny_tasks import Damped
from torch import nn
from torch.nn import functional as F

from shoal_workers.contract.batch_partition import sample_at

NUM_SAMPLES = 256


class Heads(nn.Module):
    """`late` is used in some steps only, `spare` in none. They have most of the parameters."""

    def __init__(self):
        super().__init__()
        self.used = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5))
        self.late = nn.Linear(6, 5)
        self.spare = nn.Linear(6, 11)

    def forward(self, inputs, is_late):
        outputs = self.used(inputs)
        return outputs + self.late(inputs) if is_late else outputs


class Samples(torch.utils.data.Dataset):
    """The step, inputs and a label; right for the first epoch."""

    def __init__(self, seed, global_size=8):
        self.steps = {
            sample_at(position, num_samples=NUM_SAMPLES, seed=seed): position // global_size
            for position in range(NUM_SAMPLES)
        }

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        inputs = torch.randn(6, generator=torch.Generator().manual_seed(index))
        return torch.cat([torch.tensor([self.steps[index], index % 5]), inputs])


class Late:
    """`data.late`: the steps, counted from 0, whose samples use the late head. `data.partly`: of the micro-batches of
    such a step, those that begin with an even label."""

    def __init__(self, model, data, seed):
        self.model, self.data, self.seed = model, data, seed

    def build_model(self):
        return Heads()

    def build_dataset(self, split):
        return Samples(self.seed)

    def loss(self, model, batch):
        step, label = int(batch[0, 0]), int(batch[0, 1])
        is_late = step in self.data["late"] and not (self.data.get("partly") and label % 2)
        return F.cross_entropy(model(batch[:, 2:], is_late), batch[:, 1].long())


class LateOwnAdamW(Late):
    """Its optimizer is the one that it has built, over DTensors."""

    elementwise_optimizer = False

    def build_optimizer(self, model, settings):
        return torch.optim.AdamW(model.parameters(), lr=settings["lr"], weight_decay=0.1)


class LateMomentum(Late):
    """SGD with momentum has one tensor of state, and no counter."""

    elementwise_optimizer = True

    def build_optimizer(self, model, settings):
        return torch.optim.SGD(model.parameters(), lr=settings["lr"], momentum=0.9, weight_decay=0.1)


class LateAdagrad(Late):
    """Its optimizer has the state of every parameter from the beginning."""

    def build_optimizer(self, model, settings):
        return torch.optim.Adagrad(model.parameters(), lr=settings["lr"])


class LateRule(Late):
    """Its optimizer makes its state anew in each step."""

    elementwise_optimizer = True

    def build_optimizer(self, model, settings):
        return Damped(model.parameters(), lr=settings["lr"] / 3)


class Growing(torch.optim.Optimizer):
    """From a parameter's third update on it keeps an average."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in (one for one in group["params"] if one.grad is not None):
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                if state["count"] > 2:
                    average = state.setdefault("average", torch.zeros_like(parameter))
                    average.lerp_(parameter.grad, 0.1)
                    parameter.sub_(average, alpha=group["lr"])
                parameter.sub_(parameter.grad, alpha=group["lr"])


class LateGrowth(Late):
    """Each parameter gets its average in its third update; the late head has that update in step 10."""

    def build_optimizer(self, model, settings):
        return Growing(model.parameters(), settings["lr"])


class FewRows(LateMomentum):
    """Four workers have three rows to share, so the last one has no part of any parameter."""

    def build_model(self):
        return nn.Linear(6, 3)

    def loss(self, model, batch):
        return (model(batch[:, 2:]) - batch[:, 1:2]).square().mean()
