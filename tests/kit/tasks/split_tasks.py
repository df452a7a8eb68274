"""A small decoder that a plan splits over tp, pp and cp, with what users' models have: biases, scales, options of
tables, ties, losses and metrics of every shape. `model` chooses; see `Split`."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

VOCABULARY, TOKENS, WIDTH, HIDDEN, HEADS = 37, 16, 12, 24, 6
PADDING = 5


def plan_of(*, sequential: bool, **changes: Any) -> dict[str, Any]:
    """With sequence parallelism, or without."""
    block = "blocks.*."
    styles = {f"{block}attention.{name}": "column" for name in ("query", "key", "value")}
    styles |= {f"{block}attention.out": "row", f"{block}feed_forward.up": "column", f"{block}feed_forward.down": "row"}
    styles |= {"embedding": "embedding", "head": "head"}
    if sequential:
        styles |= {f"{block}attention": "gather", f"{block}feed_forward": "gather", f"{block}norm1": "sequence"}
    return {
        "blocks": "blocks",
        "num_blocks": 2,
        "first": ["embedding"],
        "last": ["norm", "head"],
        "hidden_size": WIDTH,
        "tensor": styles,
        "attention": "blocks.*.attention.core",
        "sequence": {"tokens": 1, "labels": 1, "positions": 0},
        "num_heads": HEADS,
        "num_kv_heads": HEADS,
        "seq_len": TOKENS,
        **changes,
    }


class Chains(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Token i + 1 follows from token i; a part of the labels is ignored, more of them at the end of a sequence."""

    def __init__(self, ignored: str) -> None:
        self.ignored = ignored

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        start, stride = torch.randint(VOCABULARY, (2,), generator=generator).tolist()
        line = (start + stride * torch.arange(TOKENS + 1)) % VOCABULARY
        tokens, labels = line[:-1].clone(), line[1:].clone()
        tokens[TOKENS - 1 - index % 5 :] = PADDING
        if self.ignored:
            labels[int(torch.randint(1, TOKENS, (), generator=generator)) :] = -100
            labels[: index % 3] = -100
        if self.ignored == "one of two":  # of the sequence, one cp rank's quarter at each end has no label at all
            labels[:4] = labels[12:] = -100
        return {"tokens": tokens, "labels": labels, "positions": torch.arange(TOKENS)}


class ScaledTable(nn.Embedding):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * WIDTH**0.5


class Adapted(nn.Linear):
    """With an adapter of low rank beside the weight."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.down, self.up = nn.Linear(self.in_features, 2, bias=False), nn.Linear(2, self.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.up(self.down(x))


class Core(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Attention(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.core, self.out = Core(), nn.Linear(WIDTH, WIDTH)
        self.before = nn.LayerNorm(WIDTH) if kind == "inner" else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        width = WIDTH // HEADS
        x = self.before(x)
        q, k, v = (
            one(x).unflatten(-1, (-1, width)).transpose(1, 2)  # type: ignore[no-untyped-call]
            for one in (self.query, self.key, self.value)
        )
        mixed: Tensor = self.out(self.core(q, k, v).transpose(1, 2).flatten(2))
        return mixed


class FeedForward(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        line = Adapted if kind == "adapted" else nn.Linear
        self.up, self.down = line(WIDTH, HIDDEN), line(HIDDEN, WIDTH)
        if kind == "weight_norm":
            parametrizations.weight_norm(self.up)
        if kind == "old_weight_norm":
            nn.utils.weight_norm(self.up)
        if kind == "set_forward":
            self.up.forward = lambda x: F.linear(x, self.up.weight, self.up.bias) * 1.5  # type: ignore[method-assign]
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH)) if kind == "inner" else None

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out if self.scale is None else out * self.scale


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention(kind)
        self.norm2, self.feed_forward = nn.LayerNorm(WIDTH), FeedForward(kind)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.scale * self.attention(self.norm1(x))
        out: Tensor = x + self.gate(x).sigmoid() * self.feed_forward(self.norm2(x))
        return out


class Decoder(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        options: dict[str, dict[str, Any]] = {
            "padding_idx": {"padding_idx": PADDING},
            "frequency": {"scale_grad_by_freq": True},
            "padded frequency": {"scale_grad_by_freq": True, "padding_idx": PADDING},
            "max_norm": {"max_norm": 0.5},
            "sparse": {"sparse": True},
        }
        table = ScaledTable if kind == "scaled" else nn.Embedding
        self.embedding = table(VOCABULARY, WIDTH, **options.get(kind, {}))
        self.blocks = nn.ModuleList(Block(kind) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=kind != "tied")
        self.pools = kind == "pools"
        if kind == "tied":
            self.head.weight = self.embedding.weight
        if kind == "hooked":
            self.blocks[0].feed_forward.up.register_forward_hook(lambda _module, _inputs, out: out * 1.5)
            self.blocks[0].feed_forward.down.register_forward_pre_hook(lambda _module, inputs: (inputs[0] * 0.5,))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        logits: Tensor = self.head(x.mean(1) if self.pools else x)
        return logits


class Split:
    """`model`: {kind: what is unusual in the model, loss: what the loss does, ignored: which labels are -100}."""

    def __init__(self, model: dict[str, Any], data: dict[str, Any], seed: int) -> None:
        self.kind = model.get("kind", "")
        self.form = model.get("loss", "")
        self.ignored = model.get("ignored", "")

    def build_model(self) -> nn.Module:
        return Decoder(self.kind)

    def build_dataset(self, split: str) -> Chains:
        return Chains(self.ignored)

    def collate(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        batch = {name: torch.stack([one[name] for one in samples]) for name in ("tokens", "labels")}
        return {**batch, "positions": samples[0]["positions"]}

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Any:
        logits: Tensor = model(batch["tokens"])
        labels = batch["labels"]
        match self.form:
            case "accuracy":
                is_right = (logits.argmax(-1) == labels).float()
                probability = logits.softmax(-1).amax(-1)
                loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
                return loss, {"accuracy": is_right.mean(), "sure": probability.mean(), "same": loss}
            case "masked":
                is_counted = labels >= 0
                each = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
                is_right = (logits.argmax(-1) == labels) & is_counted
                return (each * is_counted).sum() / is_counted.sum(), {"accuracy": is_right.sum() / is_counted.sum()}
            case "smooth":
                return F.cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1), label_smoothing=0.1)
            case "weighted":
                weight = torch.linspace(0.5, 2.0, VOCABULARY)
                return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), weight, label_smoothing=0.1) + (
                    F.cross_entropy(logits.flatten(0, 1), labels.flatten(), weight)
                )
            case "gather":
                picked = logits.log_softmax(-1).gather(-1, labels.clamp_min(0).unsqueeze(-1)).squeeze(-1)
                return -(picked * (labels >= 0)).sum() / (labels >= 0).sum()
            case "in place":
                rows = logits.float().flatten(0, 1)
                rows[:, 3] = rows[:, 3] - 2.0
                rows[:, 0].mul_(0.5)
                return F.cross_entropy(rows, labels.flatten())
            case "z":
                logits = logits / 2.0
                z = torch.logsumexp(logits, -1).square().mean()
                return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + 0.01 * z, {"z": z}
            case "shifted":
                return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["tokens"][:, 1:].flatten())
            case "other":
                return F.cross_entropy(logits.flatten(0, 1), labels.clamp_min(0).flatten(), ignore_index=0)
            case "own":
                return _OwnLoss.apply(logits, labels.clamp_min(0))  # type: ignore[no-untyped-call]
            case "pooled":
                return F.cross_entropy(logits.mean(1), labels.clamp_min(0)[:, 0])
            case _:
                return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


class _OwnLoss(torch.autograd.Function):
    """Cross entropy by a function whose gradient is written by hand."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        log_probabilities = logits.log_softmax(-1)
        ctx.save_for_backward(log_probabilities, labels)
        return -log_probabilities.gather(-1, labels.unsqueeze(-1)).mean()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        log_probabilities, labels = ctx.saved_tensors
        away = log_probabilities.exp() - F.one_hot(labels, log_probabilities.shape[-1])
        return away * gradients[0] / labels.numel(), None
