"""A loop that changes at its third step how it trains, in the way that the first argument names; or has its parameters
in another order in each process, several optimizers after one backward pass, or data of its own."""

import random
import sys

import torch
from torch import nn

import shoal

HOW = sys.argv[1] if len(sys.argv) > 1 else "usual"
STEPS, GLOBAL_SIZE, WIDTH, CHANGED_AFTER = 6, 12, 4, 3


class Points(torch.utils.data.Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(5)
        self.x, self.y = (torch.randn(40, WIDTH, generator=generator) for _ in range(2))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


def made():
    norm = nn.Identity() if HOW == "own_data" else nn.BatchNorm1d(WIDTH)
    layers = [nn.Linear(WIDTH, WIDTH), norm, nn.Dropout(0.3), nn.Linear(WIDTH, WIDTH)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))


def optimizers_of(model):
    parameters = list(model.parameters())
    if HOW == "set":
        random.SystemRandom().shuffle(parameters)  # as the order of a set is
    if HOW == "two_optimizers":
        matrices, vectors = ([p for p in parameters if (p.ndim > 1) == is_matrix] for is_matrix in (True, False))
        return [torch.optim.SGD(matrices, 0.1, momentum=0.9), torch.optim.Adam(vectors, 0.01, eps=1e-3)]
    return [torch.optim.Adam(parameters, 0.03, eps=1e-3)]


def change(model):
    match HOW:
        case "unfrozen":
            model[0].requires_grad_(True)
        case "evaluating":
            model[1].eval()
        case "dropout":
            model[2].p = 0.0
        case "momentum":
            model[1].momentum = 0.5


def train_on_points_of_its_own(run, model, optimizer):
    x, y = Points()[:]
    while run.step < STEPS:
        torch.manual_seed(run.step)
        run.backward((model(x) - y).square().mean())
        run.steps(optimizer)


def train(run):
    torch.manual_seed(0)
    model = made()
    if HOW == "unfrozen":
        model[0].requires_grad_(False)
    optimizers = optimizers_of(model)
    run.track(model=model, **{f"optimizer{number}": one for number, one in enumerate(optimizers)})
    bank = torch.zeros(40)
    if HOW in ("own_data", "own_data_norm"):
        train_on_points_of_its_own(run, model, *optimizers)
        return
    for x, y in run.batches(Points(), global_size=GLOBAL_SIZE):
        if run.step == STEPS:
            break
        if HOW == "bank":
            bank[run.step] = float(x.mean())
        run.backward((model(x) - y).square().mean(), weight=len(x))
        if run.steps(optimizers[0]):
            for other in optimizers[1:]:
                run.update(other)
            if run.step == CHANGED_AFTER:
                change(model)


if __name__ == "__main__":
    shoal.run(train)
