"""Small tasks as a user writes them; they import nothing from Shoal."""

import math
import os
import random
import time
from pathlib import Path

import torch
import torch.distributed.fsdp
from torch import nn
from torch.nn import functional as F

SLOW_S = 3.0
"""What `Faulty` waits for the data of one step: far more than a busy machine makes others wait."""


class Block(nn.Module):
    def __init__(self, dim, dropout):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 3 * dim)
        self.down = nn.Linear(3 * dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class NextToken(nn.Module):
    def __init__(self, vocab, dim, layers, dropout):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim, dropout) for _ in range(layers))
        self.head = nn.Linear(dim, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens).cumsum(1)
        for block in self.blocks:
            x = block(x)
        return self.head(x).float()


class Sequences(torch.utils.data.Dataset):
    """Noisy counting: sample i begins at i and goes up by i % 3 + 1."""

    def __init__(self, length, vocab, seq_len):
        self.length, self.vocab, self.seq_len = length, vocab, seq_len

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if not 0 <= index < self.length:
            raise IndexError(index)
        return (torch.arange(self.seq_len + 1) * (index % 3 + 1) + index) % self.vocab


class Counting:
    """The plain case: dropout, tied weights, layer norms, an odd width that no world size divides."""

    tokens_per_sample = 8
    bytes_per_token = 1.0

    def __init__(self, model, data, seed):
        self.model, self.data, self.seed = model, data, seed

    def build_model(self):
        return NextToken(29, self.model.get("dim", 21), self.model.get("layers", 2), self.model.get("dropout", 0.1))

    def build_dataset(self, split):
        return Sequences(self.data.get("length", 50) if split == "train" else 11, 29, 8)

    def loss(self, model, batch):
        logits = model(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


class Paced(Counting):
    """Each micro-batch takes `model.pace_s` seconds more, as if an accelerator computed."""

    def loss(self, model, batch):
        time.sleep(self.model["pace_s"])
        return super().loss(model, batch)


class Augmenting(Counting):
    """Draws from Python's and torch's generators while it reads samples, and steps SGD with momentum on DTensors."""

    elementwise_optimizer = False

    def build_dataset(self, split):
        class Shifted(Sequences):
            def __getitem__(self, index):
                return (super().__getitem__(index) + random.randrange(3) + int(torch.randint(2, ()))) % self.vocab

        return Shifted(40, 29, 8) if split == "train" else None

    def build_optimizer(self, model, settings):
        return torch.optim.SGD(model.parameters(), lr=settings["lr"], momentum=0.9)


class Momentum(Counting):
    """An elementwise optimizer of torch, about which it says nothing."""

    def build_optimizer(self, model, settings):
        return torch.optim.SGD(model.parameters(), lr=settings["lr"], momentum=0.9, nesterov=True, weight_decay=0.01)


class Damped(torch.optim.Optimizer):
    """Bounded steps along a moving average, which it makes anew in each; the rate falls with each update."""

    def __init__(self, params, lr, betas=(0.9, 0.99)):
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(step=torch.zeros(()), average=torch.zeros_like(parameter))
                state["step"] += 1
                direction = state["average"].mul(first).add(parameter.grad, alpha=1 - first)
                direction = direction / (direction.abs() + 1e-2)
                parameter.add_(direction, alpha=-group["lr"] / (1 + 0.1 * float(state["step"])))
                state["average"] = state["average"].mul(second).add(parameter.grad, alpha=1 - second)


class OwnRule(Counting):
    """An elementwise optimizer of its own."""

    elementwise_optimizer = True

    def build_optimizer(self, model, settings):
        return Damped(model.parameters(), lr=settings["lr"] / 10)


class Slow(Counting):
    """Its preparation takes until the file `data.gate`/go exists; it is begun once per process that finds no result."""

    def prepare(self, progress):
        gate = Path(self.data["gate"])
        result = gate / "result"
        if result.exists():
            return
        progress("half way")
        (gate / f"begun-{os.getpid()}").touch()
        while not (gate / "go").exists():
            time.sleep(0.01)
        result.touch()


class Failing(Counting):
    """Raises at the place named by `model.fail`, on the sample named by `model.on`."""

    def prepare(self, progress):
        progress("half way")
        if self.model.get("fail") == "prepare":
            raise FileNotFoundError("no such corpus: the-corpus")

    def build_model(self):
        if self.model.get("fail") == "build":
            raise ValueError("dim must be even")
        return super().build_model()

    def loss(self, model, batch):
        if self.model.get("fail") == "loss" and bool((batch[:, 0] == self.model["on"]).any()):
            raise ZeroDivisionError("the user's own mistake")
        loss = super().loss(model, batch)
        if self.model.get("fail") == "nan" and bool((batch[:, 0] == self.model["on"]).any()):
            return loss * float("nan")
        return loss


class Breaking(Counting):
    """Fails as a node does, in the way named by `model.fault`, on the samples that begin with `model.on`; on all of
    them without it."""

    def loss(self, model, batch):
        on = self.model.get("on")
        if on is None or bool((batch[:, 0] == on).any()):
            match self.model["fault"]:
                case "disk":
                    Path("/dev/full").write_text("x")
                case "memory":
                    torch.empty(10**15)
                case "device":
                    raise RuntimeError("CUDA error: unspecified launch failure")
        return super().loss(model, batch)


class Steep(Counting):
    """Gradients far beyond what is usual, on some samples only."""

    def loss(self, model, batch):
        return super().loss(model, batch) * (1e7 if bool((batch[:, 0] == self.model["on"]).any()) else 1.0)


class Spiking(Counting):
    """The loss of the samples that begin with `model.on` is infinite: on the rank that `model.wrong` names the first
    time only, or everywhere each time without it."""

    spikes = 0

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        if not bool((batch[:, 0] == self.model["on"]).any()):
            return loss
        wrong = self.model.get("wrong")
        if wrong is None:
            return loss * float("inf")
        if torch.distributed.get_rank() == wrong and not self.spikes:
            self.spikes = 1
            return loss * float("inf")
        return loss


class Routed(Counting):
    """Some parameters have a gradient in some micro-batches only, one never."""

    def build_model(self):
        model = super().build_model()
        model.shift = nn.Parameter(torch.zeros(3, 29))
        model.idle = nn.Parameter(torch.ones(5))
        plain = model.forward
        model.forward = lambda tokens: plain(tokens) + (model.shift[tokens[0, 0] % 3] if tokens[0, 0] % 4 == 1 else 0)
        return model


class Lying(Counting):
    """On the rank that `model.liar` names, the arithmetic is wrong in the last bits."""

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        is_liar = torch.distributed.is_initialized() and torch.distributed.get_rank() == self.model.get("liar")
        return loss * (1 + 2**-20) if is_liar else loss


_OTHER_COLLECTIVES = compile(
    "torch.distributed.broadcast(torch.zeros(5), src=torch.distributed.get_rank()); torch.distributed.barrier()",
    torch.distributed.fsdp.__file__,
    "exec",
)
"""As a fault of FSDP would call them: a task's own are refused."""


class Faulty(Counting):
    """A rank has a fault while the environment says so: a counter of its own would count the steps of a proof, too."""

    def build_dataset(self, split):
        sequences = super().build_dataset(split)
        return sequences if split != "train" else SlowSequences(sequences, self)

    def is_struck(self, fault):
        return self.data["fault"] == fault and "SHOALTEST_FAULT" in os.environ

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        if self.is_struck("diverge"):
            exec(_OTHER_COLLECTIVES)
        if self.is_struck("nan"):
            loss = loss * math.nan
        return loss


class SlowSequences(torch.utils.data.Dataset):
    def __init__(self, sequences, task):
        self.sequences, self.task = sequences, task

    def __len__(self):
        return len(self.sequences)

    def __getitem__(self, index):
        if self.task.is_struck("slow"):
            time.sleep(SLOW_S / 2)  # a micro-batch has two samples
        return self.sequences[index]
