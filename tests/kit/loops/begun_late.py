"""A loop that begins after some steps to depend on what it does not track: `begun_late.py HOW BEGIN STEPS`.

What `HARMLESS` of test_begun_late.py names is not tracked either; the model that comes out does not depend on it.
"""

import copy
import logging
import random
import sys
import time
import weakref
from collections import deque

import numpy as np
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

import shoal

HOW = sys.argv[1] if len(sys.argv) > 1 else "nothing"
BEGIN, STEPS = (int(argument) for argument in sys.argv[2:4] or (4, 24))
GLOBAL_SIZE, WIDTH = 12, 6
COUNTED = {}


class Ema:
    def __init__(self, model):
        self.shadow = {name: value.detach().clone() for name, value in model.named_parameters()}

    def update(self, model):
        for name, value in model.named_parameters():
            self.shadow[name].data.mul_(0.9).add_(value.data, alpha=0.1)


class Lookahead:
    def __init__(self, parameters):
        self.parameters = list(parameters)
        self.slow = [parameter.detach().clone() for parameter in self.parameters]

    @torch.no_grad()
    def step(self):
        for slow, parameter in zip(self.slow, self.parameters, strict=True):
            slow.lerp_(parameter, 0.5)
            parameter.copy_(slow)


class Accuracy:
    def __init__(self):
        self.right, self.seen, self.history = 0, 0, []

    def update(self, answer, y):
        self.right += int((answer.sign() == y.sign()).sum())
        self.seen += y.numel()
        self.history.append(self.right / self.seen)


def make_data():
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(*(torch.randn(48, WIDTH, generator=generator) for _ in range(2)))


def make_model():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH + 1), nn.Tanh(), nn.Linear(WIDTH + 1, WIDTH))


def train(run):
    torch.manual_seed(0)
    model, data = make_model(), make_data()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, BEGIN)
    tracked = {} if HOW == "schedule" else {"schedule": schedule}
    run.track(model=model, optimizer=optimizer, **tracked)
    if HOW == "accepted":
        run.untracked("ema")
    mixing = torch.Generator().manual_seed(1)
    noise, draws = np.random.default_rng(2), random.Random(3)
    teacher, averaged, masks, best_weights = None, None, {}, None
    ema, ahead = Ema(model), Lookahead(model.parameters())
    history, recent, best, patience = [], deque(maxlen=5), 1e9, 0
    losses, started, accuracy, counts = [], time.monotonic(), Accuracy(), torch.zeros(WIDTH, WIDTH + 2)
    fixed = [parameter.detach().clone() for parameter in model.parameters()]
    log, validating = logging.getLogger("loop"), torch.Generator()
    strange = {
        "meta": torch.empty(WIDTH + 1, WIDTH, device="meta"),
        "sparse": torch.eye(WIDTH).to_sparse(),
        "objects": np.array([[None] * WIDTH] * (WIDTH + 1)),
        "gone": weakref.proxy(Accuracy()),
        "lazy": nn.LazyLinear(WIDTH),
    }
    weights, shown, batch = model.state_dict(), None, None
    checked = DataLoader(data, batch_size=24, shuffle=True, generator=torch.Generator().manual_seed(4))
    source, size = data, {"global_size": GLOBAL_SIZE, "micro_size": 3}
    scale = 0.9 ** max(0, run.step - BEGIN)
    for x, y in run.batches(source, **size):
        if run.step == STEPS:
            break
        has_begun = run.step >= BEGIN
        if has_begun and HOW == "mixup":
            share = float(torch.rand((), generator=mixing))
            x, y = share * x + (1 - share) * x.flip(0), share * y + (1 - share) * y.flip(0)
        if has_begun and HOW == "numpy":
            x = x + 0.1 * torch.from_numpy(noise.normal(size=WIDTH).astype(np.float32))
        if has_begun and HOW == "python":
            x = x * draws.uniform(0.9, 1.1)
        if HOW == "seeded":
            mixing.manual_seed(run.step)
            x = x + 0.1 * torch.rand((), generator=mixing)
        answer = model(x)
        loss = (answer - y).square().mean()
        if HOW == "strange":
            batch = (x, y, torch.rand(3, generator=validating.manual_seed(1)))
            with torch.inference_mode():
                shown = model(x)
        if HOW == "teacher" and run.step >= BEGIN:
            if teacher is None:
                teacher = copy.deepcopy(model)
            loss = loss + (answer - teacher(x).detach()).square().mean()
        if HOW == "remade":
            loss = loss * scale
        if HOW == "history" and len(history) >= BEGIN:
            loss = loss * (1 + min(history))
        if HOW == "deque" and has_begun:
            loss = loss * (1 + sum(recent))
        run.backward(loss, weight=len(x))
        accuracy.update(answer, y)
        counts[:, :WIDTH] += (answer.detach() > 0).double().mean(0)
        if not run.steps(optimizer):
            continue
        if HOW != "nothing":
            schedule.step()
        with torch.no_grad():
            if HOW == "remade":
                scale = 0.9 ** max(0, run.step - BEGIN)
            if HOW == "masks":
                if run.step == BEGIN:
                    masks = {name: (p.abs() > 0.1).float() for name, p in model.named_parameters() if p.ndim > 1}
                for name, parameter in model.named_parameters():
                    if name in masks:
                        parameter.mul_(masks[name])
            if HOW in ("ema", "accepted") and has_begun:
                ema.update(model)
            if HOW == "average" and has_begun:
                averaged = averaged or AveragedModel(model)
                averaged.update_parameters(model)
            if HOW == "lookahead" and run.step % BEGIN == 0:
                ahead.step()
            if HOW == "best_weights" and run.loss < best:
                best_weights = copy.deepcopy(model.state_dict())
            if HOW == "logger":
                log.debug("step %s", run.step)
            if HOW == "confusion" and run.step % 4 == 0:
                counts.zero_()
            if HOW == "loader" and run.step % 4 == 0:
                losses += [float((model(a) - b).square().mean()) for a, b in checked]
        if HOW == "patience":
            patience = 0 if run.loss < 0.999 * best else patience + 1
            if patience >= 3:
                optimizer.param_groups[0]["lr"] *= 0.5
        if HOW == "global":
            COUNTED[run.step] = run.loss
            if len(COUNTED) >= BEGIN:
                optimizer.param_groups[0]["lr"] = 0.01 * len(COUNTED)
        history.append(run.loss)
        recent.append(run.loss)
        best = min(best, run.loss)
        losses.append(run.loss)
        run.log(spent_s=time.monotonic() - started, best=best, mean=sum(losses) / len(losses), fixed=len(fixed))
        assert len(strange) == 5 and weights.keys() == model.state_dict().keys() and (shown is None) == (batch is None)
    if HOW == "best_weights" and best_weights is not None:
        model.load_state_dict(best_weights)


if __name__ == "__main__":
    shoal.run(train)
