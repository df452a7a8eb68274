"""Ordinary training recipes as loops, by name: `recipes.py NAME`. Each tracks what it needs to go on."""

import copy
import math
import random
import sys

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize
from torch.optim import swa_utils
from torch.optim.lr_scheduler import (
    CosineAnnealingWarmRestarts,
    LambdaLR,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

import shoal

STEPS, SIZE, WIDTH, CLASSES = 12, 12, 6, 4
RECIPES = {}


def recipe(function):
    RECIPES[function.__name__] = function
    return function


class Points(torch.utils.data.Dataset):
    def __init__(self, num=60):
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(num, WIDTH, generator=generator)
        self.y = (self.x[:, 0] > 0).long() + 2 * (self.x[:, 1] > 0).long()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


class Images(Points):
    def __getitem__(self, index):
        image = self.x[index].repeat(12)[:64].reshape(1, 8, 8)
        return image, self.y[index]


def classifier(hidden=8):
    return nn.Sequential(nn.Linear(WIDTH, hidden), nn.GELU(), nn.Linear(hidden, CLASSES))


def watch(run, *modules):
    """Log what would come out now."""
    values = [value.detach().double().abs().sum() for module in modules for value in module.state_dict().values()]
    run.log(out=float(sum(values)))


def batches(run, data=None):
    for batch in run.batches(data or Points(), global_size=SIZE, micro_size=3):
        if run.step == STEPS:
            return
        yield batch


def global_batches(run, data=None):
    for batch in run.global_batches(data or Points(), global_size=SIZE, micro_size=3):
        if run.step == STEPS:
            return
        yield batch


class Box:
    """Numbers and tensors by name."""

    def __init__(self, **values):
        self.__dict__.update(values)

    def state_dict(self):
        return dict(self.__dict__)

    def load_state_dict(self, state):
        self.__dict__.clear()
        self.__dict__.update(state)


@recipe
def wgan(run):
    maker, judge = (
        nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, WIDTH)),
        nn.Sequential(nn.Linear(WIDTH, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1)),
    )
    for_maker = torch.optim.Adam(maker.parameters(), 0.01, betas=(0.0, 0.9))
    for_judge = torch.optim.Adam(judge.parameters(), 0.01, betas=(0.0, 0.9))
    run.track(maker=maker, judge=judge, for_maker=for_maker, for_judge=for_judge)
    for batch in global_batches(run):
        for _ in range(2):
            for real, _ in batch:
                fake = maker(torch.randn(len(real), 3)).detach()
                share = torch.rand(len(real), 1)
                between = (share * real + (1 - share) * fake).requires_grad_()
                [slope] = torch.autograd.grad(judge(between).sum(), between, create_graph=True)
                penalty = (slope.norm(dim=1) - 1).square().mean()
                run.backward(judge(fake).mean() - judge(real).mean() + 10 * penalty, weight=len(real))
            run.update(for_judge)
        for real, _ in batch:
            judge.requires_grad_(False)
            run.backward(-judge(maker(torch.randn(len(real), 3))).mean(), weight=len(real))
            judge.requires_grad_(True)
        run.update(for_maker)
        watch(run, maker, judge)
        run.commit()


@recipe
def gan_with_zero_grad(run):
    maker, judge = nn.Linear(3, WIDTH), nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, 1))
    for_maker, for_judge = (torch.optim.RMSprop(m.parameters(), 0.003) for m in (maker, judge))
    run.track(maker=maker, judge=judge, for_maker=for_maker, for_judge=for_judge)
    criterion = nn.BCEWithLogitsLoss()
    for batch in global_batches(run):
        for_judge.zero_grad()
        for real, _ in batch:
            fake = maker(torch.randn(len(real), 3))
            ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
            loss = criterion(judge(real), ones) + criterion(judge(fake.detach()), zeros)
            run.backward(loss, weight=len(real))
        run.update(for_judge, clip=1.0)
        for_maker.zero_grad()
        for real, _ in batch:
            run.backward(criterion(judge(maker(torch.randn(len(real), 3))), torch.ones(len(real), 1)), weight=len(real))
        run.update(for_maker)
        for_judge.zero_grad()
        watch(run, maker, judge)
        run.commit()


class Replay:
    def __init__(self, size):
        self.rows, self.size, self.at = [], size, 0

    def add(self, row):
        self.rows.append(row)
        del self.rows[: -self.size]
        self.at += 1

    def state_dict(self):
        return {"rows": [list(row) for row in self.rows], "at": self.at}

    def load_state_dict(self, state):
        self.rows, self.at = [tuple(row) for row in state["rows"]], state["at"]


@recipe
def dqn(run):
    net, target, replay = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3), Replay(40)
    target.load_state_dict(net.state_dict())
    optimizer = torch.optim.Adam(net.parameters(), 0.02)
    state = Box(observation=torch.zeros(WIDTH))
    run.track(net=net, target=target, optimizer=optimizer, replay=replay, state=state)
    while run.step < STEPS:
        torch.manual_seed(run.step)
        random.seed(run.step)
        for _ in range(4):
            explores = random.random() < max(0.1, 1 - run.step / 8)
            action = random.randrange(3) if explores else int(net(state.observation).argmax())
            following = torch.tanh(state.observation.roll(action) + 0.3 * torch.randn(WIDTH))
            replay.add((state.observation, action, float(following[0]), following))
            state.observation = following
        rows = [random.choice(replay.rows) for _ in range(8)]
        before, after = torch.stack([row[0] for row in rows]), torch.stack([row[3] for row in rows])
        actions, rewards = torch.tensor([row[1] for row in rows]), torch.tensor([row[2] for row in rows])
        with torch.no_grad():
            wanted = rewards + 0.9 * target(after).max(1).values
        value = net(before).gather(1, actions[:, None]).squeeze(1)
        run.backward(functional.smooth_l1_loss(value, wanted))
        run.update(optimizer, clip=1.0)
        if (run.step + 1) % 3 == 0:
            target.load_state_dict(net.state_dict())
        watch(run, net, target)
        run.commit()


@recipe
def curriculum(run):
    model = classifier()
    optimizer = torch.optim.NAdam(model.parameters(), 0.02)
    run.track(model=model, optimizer=optimizer)
    for x, y in batches(run):
        hard = x.abs().mean(1) > 0.5 + 0.05 * run.step
        weights = torch.where(hard, 0.0, 1.0)
        loss = (functional.cross_entropy(model(x), y, reduction="none") * weights).sum() / weights.sum().clamp(min=1)
        run.backward(loss, weight=float(weights.sum().clamp(min=1)))
        if run.steps(optimizer):
            watch(run, model)


class Ema:
    def __init__(self, model):
        self.model, self.num = copy.deepcopy(model).requires_grad_(False), 0

    @torch.no_grad()
    def update(self, model):
        self.num += 1
        decay = min(0.99, (1 + self.num) / (10 + self.num))
        for old, new in zip(self.model.parameters(), model.parameters(), strict=True):
            old.data = old.data * decay + new.data * (1 - decay)

    def state_dict(self):
        return {"model": self.model.state_dict(), "num": self.num}

    def load_state_dict(self, state):
        self.model.load_state_dict(state["model"])
        self.num = state["num"]


@recipe
def ema_with_warmup(run):
    model = classifier()
    ema, optimizer = Ema(model), torch.optim.AdamW(model.parameters(), 0.01, weight_decay=0.1)
    run.track(model=model, ema=ema, optimizer=optimizer)
    for x, y in batches(run):
        run.backward(functional.cross_entropy(model(x), y), weight=len(x))
        if run.steps(optimizer):
            ema.update(model)
            watch(run, model, ema.model)


@recipe
def swa(run):
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES))
    averaged = swa_utils.AveragedModel(model, use_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
    constant = swa_utils.SWALR(optimizer, 0.05, anneal_epochs=3)
    run.track(model=model, averaged=averaged, optimizer=optimizer, cosine=cosine, constant=constant)
    for x, y in batches(run):
        run.backward(functional.cross_entropy(model(x), y), weight=len(x))
        if run.steps(optimizer):
            if run.step > 5:
                averaged.update_parameters(model)
                constant.step()
            else:
                cosine.step()
            watch(run, model, averaged)


@recipe
def ema_by_swa_utils(run):
    model = classifier()
    averaged = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.Adagrad(model.parameters(), 0.1)
    run.track(model=model, averaged=averaged, optimizer=optimizer)
    for x, y in batches(run):
        logits = model(x)
        with torch.no_grad():
            soft = averaged(x).softmax(1)
        loss = functional.cross_entropy(logits, y) - (soft * logits.log_softmax(1)).sum(1).mean()
        run.backward(loss, weight=len(x))
        if run.steps(optimizer):
            averaged.update_parameters(model)
            watch(run, model, averaged)


class Lookahead(torch.optim.Optimizer):
    """Wraps another optimizer, as of pytorch_optimizer."""

    def __init__(self, base, every=3):
        self.base, self.every = base, every
        super().__init__([p for group in base.param_groups for p in group["params"]], {"num": 0, "lr": 0.0})
        self.param_groups = base.param_groups
        for group in self.param_groups:
            group["num"] = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.base.step()
        for group in self.param_groups:
            group["num"] += 1
            for parameter in group["params"]:
                state = self.base.state[parameter]
                if "slow" not in state:
                    state["slow"] = parameter.detach().clone()
                if group["num"] % self.every == 0:
                    state["slow"].add_(parameter - state["slow"], alpha=0.5)
                    parameter.copy_(state["slow"])

    def state_dict(self):
        return self.base.state_dict()

    def load_state_dict(self, state):
        self.base.load_state_dict(state)
        self.param_groups = self.base.param_groups


@recipe
def lookahead_wrapper(run):
    model = classifier()
    optimizer = Lookahead(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    run.track(model=model, optimizer=optimizer)
    for x, y in batches(run):
        run.backward(functional.cross_entropy(model(x), y), weight=len(x))
        if run.steps(optimizer):
            watch(run, model)


class Ascent(torch.optim.Optimizer):
    """The first half of SAM."""

    def __init__(self, parameters, rho=0.05):
        super().__init__(parameters, {"rho": rho, "lr": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        [group] = self.param_groups
        norm = torch.stack([p.grad.norm() for p in group["params"]]).norm()
        for parameter in group["params"]:
            self.state[parameter]["old"] = parameter.detach().clone()
            parameter.add_(parameter.grad, alpha=float(group["rho"] / (norm + 1e-12)))

    @torch.no_grad()
    def back(self):
        for parameter in self.param_groups[0]["params"]:
            parameter.copy_(self.state[parameter].pop("old"))


@recipe
def sam(run):
    model = classifier()
    base, ascent = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), Ascent(model.parameters())
    run.track(model=model, base=base)
    for batch in global_batches(run):
        for x, y in batch:
            run.backward(functional.cross_entropy(model(x), y), weight=len(x))
        run.update(ascent)
        for x, y in batch:
            run.backward(functional.cross_entropy(model(x), y), weight=len(x))
        ascent.back()
        run.update(base)
        watch(run, model)
        run.commit()


@recipe
def r1_penalty(run):
    model = classifier()
    optimizer = torch.optim.Adamax(model.parameters(), 0.02)
    run.track(model=model, optimizer=optimizer)
    for x, y in batches(run):
        x = x.clone().requires_grad_(True)
        logits = model(x)
        loss = functional.cross_entropy(logits, y)
        if run.step % 4 == 0:
            [slope] = torch.autograd.grad(logits.logsumexp(1).sum(), x, create_graph=True)
            loss = loss + 0.5 * 4 * slope.square().sum(1).mean()
        run.backward(loss, weight=len(x))
        if run.steps(optimizer):
            watch(run, model)


@recipe
def mixup(run):
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), 0.02)
    run.track(model=model, optimizer=optimizer)
    for x, y in batches(run):
        share = float(np.random.beta(0.4, 0.4)) if run.step >= 3 else 1.0
        order = torch.randperm(len(x))
        logits = model(share * x + (1 - share) * x[order])
        loss = share * functional.cross_entropy(logits, y) + (1 - share) * functional.cross_entropy(logits, y[order])
        run.backward(loss, weight=len(x))
        if run.steps(optimizer):
            watch(run, model)


class Generator:
    """Keeps a generator."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def state_dict(self):
        return {"state": self.generator.get_state()}

    def load_state_dict(self, state):
        self.generator.set_state(state["state"].cpu())


@recipe
def cutmix_with_a_generator(run):
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, CLASSES))
    optimizer, drawn, choice = torch.optim.SGD(model.parameters(), 0.05), Generator(3), Box(corner=0, mixes=False)
    run.track(model=model, optimizer=optimizer, drawn=drawn, choice=choice)
    for x, y in batches(run, Images()):
        if choice.mixes:
            x = x.clone()
            x[:, :, choice.corner : choice.corner + 3, choice.corner : choice.corner + 3] = 0
        run.backward(functional.cross_entropy(model(x), y), weight=len(x))
        if run.steps(optimizer):
            choice.corner = int(torch.randint(0, 5, (), generator=drawn.generator))
            choice.mixes = run.step >= 4
            watch(run, model)


@recipe
def label_smoothing(run):
    model = classifier()
    optimizer = torch.optim.RAdam(model.parameters(), 0.02)
    schedule = OneCycleLR(optimizer, 0.05, total_steps=STEPS + 1)
    run.track(model=model, optimizer=optimizer, schedule=schedule)
    for x, y in batches(run):
        smoothing = 0.2 * (1 - run.step / STEPS)
        run.backward(functional.cross_entropy(model(x), y, label_smoothing=smoothing), weight=len(x))
        if run.steps(optimizer, clip=0.5):
            schedule.step()
            watch(run, model)


@recipe
def progressive_resizing(run):
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
    )
    model.append(nn.Linear(16, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    run.track(model=model, optimizer=optimizer)
    for x, y in batches(run, Images()):
        size = min(8, 4 + run.step // 3 * 2)
        x = functional.interpolate(x, size=(size, size), mode="bilinear", align_corners=False)
        run.backward(functional.cross_entropy(model(x), y), weight=len(x))
        if run.steps(optimizer):
            watch(run, model)


@recipe
def distillation(run):
    torch.manual_seed(11)
    teacher = classifier(16).eval().requires_grad_(False)
    torch.manual_seed(12)
    student = classifier()
    optimizer = torch.optim.Adam(student.parameters(), 0.02)
    run.track(student=student, optimizer=optimizer)
    for x, y in batches(run):
        heat = 4.0 - 0.2 * run.step
        with torch.no_grad():
            soft = (teacher(x) / heat).softmax(1)
        logits = student(x)
        loss = functional.kl_div((logits / heat).log_softmax(1), soft, reduction="batchmean") * heat**2
        run.backward(0.7 * loss + 0.3 * functional.cross_entropy(logits, y), weight=len(x))
        if run.steps(optimizer):
            watch(run, student)


@recipe
def several_optimizers(run):
    model = classifier()
    body, head = torch.optim.Adam(model[0].parameters(), 0.02), torch.optim.SGD(model[2].parameters(), 0.1)
    decay = MultiStepLR(head, [3, 7], 0.5)
    warm = SequentialLR(
        body, [LambdaLR(body, lambda n: (n + 1) / 4), CosineAnnealingWarmRestarts(body, 3)], milestones=[4]
    )
    run.track(model=model, body=body, head=head, decay=decay, warm=warm)
    for x, y in batches(run):
        run.backward(functional.cross_entropy(model(x), y), weight=len(x))
        if run.steps(body):
            run.update(head, clip=1.0)
            decay.step()
            warm.step()
            watch(run, model)


@recipe
def rate_finder(run):
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    schedule, found = LambdaLR(optimizer, lambda n: 2.0**n), Box(best=math.inf, rates=[], losses=[])
    run.track(model=model, optimizer=optimizer, schedule=schedule, found=found)
    for x, y in batches(run):
        run.backward(functional.cross_entropy(model(x), y), weight=len(x))
        if run.steps(optimizer):
            found.rates.append(optimizer.param_groups[0]["lr"])
            found.losses.append(run.loss)
            found.best = min(found.best, run.loss)
            watch(run, model)
            if run.loss > 4 * found.best:
                break
            schedule.step()


@recipe
def early_stopping(run):
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), 2.0)
    plateau = ReduceLROnPlateau(optimizer, patience=1, factor=0.5)
    stopper = Box(best=math.inf, bad=0)
    run.track(model=model, optimizer=optimizer, plateau=plateau, stopper=stopper)
    for x, y in batches(run):
        run.backward(functional.cross_entropy(model(x), y), weight=len(x))
        if run.steps(optimizer):
            plateau.step(run.loss)
            stopper.bad = 0 if run.loss < stopper.best - 1e-3 else stopper.bad + 1
            stopper.best = min(stopper.best, run.loss)
            watch(run, model)
            if stopper.bad >= 5:
                break


@recipe
def best_weights(run):
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    best = Box(loss=math.inf, weights={})
    run.track(model=model, optimizer=optimizer, best=best)
    for x, y in batches(run):
        run.backward(functional.cross_entropy(model(x), y), weight=len(x))
        if run.steps(optimizer):
            if run.loss < best.loss:
                best.loss, best.weights = run.loss, copy.deepcopy(model.state_dict())
            run.log(out=float(sum(value.double().abs().sum() for value in best.weights.values())))
    model.load_state_dict(best.weights)


@recipe
def accumulation(run):
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.9)
    run.track(model=model, optimizer=optimizer)
    for number, batch in enumerate(global_batches(run), run.step):
        for x, y in batch:
            run.backward(functional.cross_entropy(model(x), y) / 2, weight=len(x))
        if number % 2 == 1:
            run.update(optimizer)
        watch(run, model)
        run.commit()


@recipe
def autocast(run):
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, eps=1e-3)
    run.track(model=model, optimizer=optimizer)
    for x, y in batches(run):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(x)
        run.backward(functional.cross_entropy(logits.float(), y), weight=len(x))
        if run.steps(optimizer, clip=1.0):
            watch(run, model)


class Lora(nn.Module):
    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + functional.dropout(x, 0.1, self.training) @ self.down.T @ self.up.T * 2.0


@recipe
def lora(run):
    model = classifier()
    for number in (0, 2):
        model[number] = Lora(model[number])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.05)
    run.track(model=model, optimizer=optimizer)
    for x, y in batches(run):
        run.backward(functional.cross_entropy(model(x), y), weight=len(x))
        if run.steps(optimizer):
            watch(run, model)


def train_parametrized(run, model):
    optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.9)
    run.track(model=model, optimizer=optimizer)
    for x, y in batches(run):
        run.backward(functional.cross_entropy(model(x), y), weight=len(x))
        if run.steps(optimizer):
            watch(run, model)


@recipe
def weight_norm(run):
    model = classifier()
    for number in (0, 2):
        parametrizations.weight_norm(model[number])
    train_parametrized(run, model)


@recipe
def orthogonal(run):
    model = nn.Sequential(parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)), nn.Tanh(), nn.Linear(WIDTH, CLASSES))
    train_parametrized(run, model)


class Symmetric(nn.Module):
    def forward(self, matrix):
        return matrix.triu() + matrix.triu(1).T


@recipe
def symmetric(run):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))
    parametrize.register_parametrization(model[0], "weight", Symmetric())
    train_parametrized(run, model)


@recipe
def old_weight_norm(run):
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(torch.nn.utils.weight_norm(nn.Linear(WIDTH, 8)), nn.ReLU(), nn.Linear(8, CLASSES))
    train_parametrized(run, model)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mix = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.leave = nn.Linear(WIDTH, CLASSES, bias=False)
        self.leave.weight = self.embed.weight

    def forward(self, x, y):
        return self.leave(torch.tanh(self.mix(x + self.embed((y + 1) % CLASSES))))


@recipe
def tied(run):
    model = Tied()
    decays = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decays, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, 0.02)
    run.track(model=model, optimizer=optimizer)
    for x, y in batches(run):
        run.backward(functional.cross_entropy(model(x, y), y), weight=len(x))
        if run.steps(optimizer):
            watch(run, model)


@recipe
def dynamic_masks(run):
    model = classifier()
    weights = {name: p for name, p in model.named_parameters() if p.ndim > 1}
    masks = Box(**{name.replace(".", "_"): torch.ones_like(p) for name, p in weights.items()})
    optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.9)
    run.track(model=model, optimizer=optimizer, masks=masks)
    for x, y in batches(run):
        run.backward(functional.cross_entropy(model(x), y), weight=len(x))
        if run.steps(optimizer):
            with torch.no_grad():
                for name, parameter in weights.items():
                    key = name.replace(".", "_")
                    if run.step >= 3 and run.step % 3 == 0:
                        bound = parameter.abs().flatten().kthvalue(max(1, parameter.numel() // 4)).values
                        setattr(masks, key, (parameter.abs() > bound).float())
                    parameter.mul_(getattr(masks, key))
            watch(run, model)


@recipe
def pruned(run):
    from torch.nn.utils import prune

    model = classifier()
    prune.identity(model[0], "weight")
    optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.9)
    run.track(model=model, optimizer=optimizer)
    for x, y in batches(run):
        run.backward(functional.cross_entropy(model(x), y), weight=len(x))
        if run.steps(optimizer):
            if run.step == 4:
                with torch.no_grad():
                    model[0].weight_mask.copy_((model[0].weight_orig.abs() > 0.1).float())
            watch(run, model)


@recipe
def falling_dropout(run):
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, CLASSES))
    optimizer = torch.optim.Adadelta(model.parameters(), 1.0)
    run.track(model=model, optimizer=optimizer)
    for x, y in batches(run):
        run.backward(functional.cross_entropy(model(x), y), weight=len(x))
        if run.steps(optimizer):
            model[2].p = max(0.0, model[2].p - 0.04)
            watch(run, model)


@recipe
def byol(run):
    online = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, WIDTH))
    target, predictor = copy.deepcopy(online).requires_grad_(False), nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD([*online.parameters(), *predictor.parameters()], 0.05, momentum=0.9)
    run.track(online=online, target=target, predictor=predictor, optimizer=optimizer)
    target.eval()
    for x, _ in batches(run):
        views = [x + 0.1 * torch.randn_like(x) for _ in range(2)]
        losses = []
        for first, second in (views, views[::-1]):
            with torch.no_grad():
                wanted = target(second)
            losses.append(-functional.cosine_similarity(predictor(online(first)), wanted).mean())
        run.backward(sum(losses), weight=len(x))
        if run.steps(optimizer):
            share = 1 - 0.1 * (math.cos(math.pi * run.step / STEPS) + 1) / 2
            with torch.no_grad():
                for old, new in zip(target.parameters(), online.parameters(), strict=True):
                    old.mul_(share).add_(new, alpha=1 - share)
                for old, new in zip(target.buffers(), online.buffers(), strict=True):
                    old.copy_(new)
            watch(run, online, target, predictor)


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.heads = nn.Linear(WIDTH, 8), nn.ModuleList([nn.Linear(8, CLASSES), nn.Linear(8, WIDTH)])
        self.scales = nn.ParameterList([nn.Parameter(torch.zeros(())) for _ in range(2)])

    def forward(self, x, y):
        hidden = torch.relu(self.body(x))
        losses = functional.cross_entropy(self.heads[0](hidden), y), (self.heads[1](hidden) - x).square().mean()
        return sum(loss * (-scale).exp() + scale for loss, scale in zip(losses, self.scales, strict=True))


@recipe
def uncertain_tasks(run):
    model = MultiTask()
    groups = [{"params": [*model.body.parameters(), *model.heads.parameters()]}]
    groups.append({"params": list(model.scales), "lr": 0.1})
    optimizer = torch.optim.Adam(groups, 0.02, amsgrad=True)
    run.track(model=model, optimizer=optimizer)
    for x, y in batches(run):
        run.backward(model(x, y), weight=len(x))
        if run.steps(optimizer):
            watch(run, model)


@recipe
def unfreezing(run):
    model = classifier()
    model[0].requires_grad_(run.step >= 4)
    groups = [{"params": model[2].parameters(), "lr": 0.1}, {"params": model[0].parameters(), "lr": 0.02}]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    run.track(model=model, optimizer=optimizer)
    for x, y in batches(run):
        run.backward(functional.cross_entropy(model(x), y), weight=len(x))
        if run.steps(optimizer):
            if run.step == 4:
                model[0].requires_grad_(True)
            watch(run, model)


class Vae(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, 4), nn.Linear(2, WIDTH)

    def forward(self, x, beta):
        mean, log_variance = self.enter(x).chunk(2, dim=1)
        drawn = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
        return (self.leave(drawn) - x).square().sum(1).mean() + beta * divergence


@recipe
def vae(run):
    model = Vae()
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    run.track(model=model, optimizer=optimizer)
    for x, _ in batches(run):
        run.backward(model(x, min(1.0, run.step / 6)), weight=len(x))
        if run.steps(optimizer):
            watch(run, model)


@recipe
def diffusion(run):
    model = nn.Sequential(nn.Linear(WIDTH + 1, 16), nn.SiLU(), nn.Linear(16, WIDTH))
    ema, optimizer = Ema(model), torch.optim.AdamW(model.parameters(), 0.01)
    kept = torch.linspace(0.99, 0.1, 20).cumprod(0)
    run.track(model=model, ema=ema, optimizer=optimizer)
    for x, _ in batches(run):
        times = torch.randint(0, 20, (len(x),))
        noise, share = torch.randn_like(x), kept[times][:, None]
        guess = model(torch.cat([share.sqrt() * x + (1 - share).sqrt() * noise, times[:, None] / 20], 1))
        run.backward((guess - noise).square().mean(), weight=len(x))
        if run.steps(optimizer, clip=1.0):
            ema.update(model)
            watch(run, model, ema.model)


@recipe
def reinforce(run):
    policy = classifier()
    optimizer, baseline = torch.optim.Adam(policy.parameters(), 0.05), Box(mean=0.0)
    run.track(policy=policy, optimizer=optimizer, baseline=baseline)
    for x, y in batches(run):
        chances = torch.distributions.Categorical(logits=policy(x))
        actions = chances.sample()
        rewards = (actions == y).float()
        loss = -(chances.log_prob(actions) * (rewards - baseline.mean)).mean() - 0.01 * chances.entropy().mean()
        run.backward(loss, weight=len(x))
        if run.steps(optimizer):
            baseline.mean = 0.9 * baseline.mean + 0.1 * run.loss
            watch(run, policy)


class Centers(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.head = nn.Linear(WIDTH, 3), nn.Linear(3, CLASSES)
        self.centers = nn.Parameter(torch.randn(CLASSES, 3))

    def forward(self, x, y):
        features = torch.tanh(self.net(x))
        return functional.cross_entropy(self.head(features), y), (features - self.centers[y]).square().sum(1).mean()


@recipe
def center_loss(run):
    model = Centers()
    optimizer = torch.optim.SGD([*model.net.parameters(), *model.head.parameters()], 0.1)
    for_centers = torch.optim.SGD([model.centers], 0.5)
    run.track(model=model, optimizer=optimizer, for_centers=for_centers)
    for x, y in batches(run):
        loss, distance = model(x, y)
        run.backward(loss + 0.1 * distance, weight=len(x))
        if run.steps(optimizer):
            run.update(for_centers)
            watch(run, model)


@recipe
def snapshot_ensemble(run):
    model, ensemble = classifier(), Box(members=[])
    optimizer = torch.optim.SGD(model.parameters(), 0.3, momentum=0.9)
    schedule = CosineAnnealingWarmRestarts(optimizer, 4)
    run.track(model=model, optimizer=optimizer, schedule=schedule, ensemble=ensemble)
    for x, y in batches(run):
        run.backward(functional.cross_entropy(model(x), y), weight=len(x))
        if run.steps(optimizer):
            schedule.step()
            if run.step % 4 == 0:
                ensemble.members.append({name: value.clone() for name, value in model.state_dict().items()})
            total = sum(value.double().abs().sum() for member in ensemble.members for value in member.values())
            run.log(out=float(total))


@recipe
def noisy_gradients(run):
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run.track(model=model, optimizer=optimizer)
    for x, y in batches(run):
        run.backward(functional.cross_entropy(model(x), y), weight=len(x))
        if run.steps(optimizer):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=0.01 / (1 + run.step))
            watch(run, model)


def train(run):
    torch.manual_seed(0)
    RECIPES[sys.argv[1]](run)


if __name__ == "__main__":
    shoal.run(train)
