"""A small decoder whose plan is right, and one for each way in which a plan of one's own can be wrong.

`model.kind` says what is wrong; `plan_of(kind)` is the plan that a user would write.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, T, WIDTH, HEADS = 64, 16, 32, 4
RIGHT = ("", "partial", "between", "ignored", "shifted", "metric", "mean", "weighted")
"""Kinds whose plan is right on every axis."""
WRONG = {
    "fused": "tp2",
    "head_norm": "tp2",
    "small_norm": "tp2",
    "skip": "pp2",
    "pool": "cp2",
    "arange": "cp2",
}
"""Kinds, each with the layout that its plan is wrong about."""


class Chain(torch.utils.data.Dataset):
    """Token i + 1 follows from token i and the sample's stride: {tokens, labels}, each (T,) int64."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        g = torch.Generator().manual_seed(index)
        start, stride = torch.randint(VOCAB, (), generator=g), torch.randint(1, 5, (), generator=g)
        line = (start + stride * torch.arange(T + 1)) % VOCAB
        return {"tokens": line[:-1].clone(), "labels": line[1:].clone(), "positions": torch.arange(T)}


class Core(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Attention(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.k = kind, WIDTH // HEADS
        if kind == "fused":
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        else:
            self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head_norm = nn.LayerNorm(self.k) if "norm" in kind or kind in ("partial", "half") else nn.Identity()
        self.core, self.out = Core(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, -1) if self.kind == "fused" else (self.query(x), self.key(x), self.value(x))
        q, k, v = (part.unflatten(-1, (-1, self.k)).transpose(1, 2) for part in parts)
        if self.kind == "small_norm":  # so that its gradient is a small part of the model's
            q = q + 0.01 * self.head_norm(q)
        elif self.kind != "half" or q.dtype is torch.bfloat16:  # as for a kernel that exists in half precision only
            q = self.head_norm(q)
        return self.out(self.core(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention(kind)
        self.norm2, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embedding, self.place = nn.Embedding(VOCAB, WIDTH), nn.Embedding(T, WIDTH)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        x = first = self.embedding(tokens)
        if self.kind == "arange":
            x = x + self.place(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
            if self.kind == "between":
                x = x * 0.5
        if self.kind == "skip":
            x = x + first
        if self.kind == "pool":
            x = x - x.mean(1, keepdim=True)
        logits = self.head(self.norm(x))
        return logits.mean(1) if self.kind == "mean" else logits


class Planned:
    def __init__(self, model: dict[str, Any], data: dict[str, Any], seed: int) -> None:
        self.kind = str(model.get("kind", ""))

    def build_model(self) -> nn.Module:
        return Decoder(self.kind)

    def build_dataset(self, split: str) -> Chain:
        return Chain()

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Any:
        logits, labels = model(batch["tokens"]), batch["labels"]
        if self.kind == "mean":
            return F.cross_entropy(logits, labels[:, 0])
        if self.kind == "shifted":  # the last token has no label
            logits, labels = logits[:, :-1], batch["tokens"][:, 1:]
        if self.kind in ("ignored", "weighted"):  # some of the first part's tokens, and all of the second's
            labels = labels.clone()
            labels[0, :3] = labels[:, T // 4 : -T // 4] = -100
        if self.kind == "weighted":
            total = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
            num = (labels != -100).sum()
            return total, num, {"first": batch["tokens"][:, 0].float().mean()}
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        return (loss, {"largest": logits.detach().amax()}) if self.kind == "metric" else loss


def plan_of(kind: str) -> dict[str, Any]:
    """As a user would write it."""
    columns = ("qkv",) if kind == "fused" else ("query", "key", "value")
    tensor = {f"blocks.*.attention.{name}": "column" for name in columns}
    tensor |= {"blocks.*.attention.out": "row", "blocks.*.up": "column", "blocks.*.down": "row"}
    if kind == "partial":
        tensor["blocks.*.attention.head_norm"] = "partial"
    return {
        "blocks": "blocks",
        "num_blocks": 4,
        "first": ["embedding", "place"],
        "last": ["norm", "head"],
        "hidden_size": WIDTH,
        "tensor": tensor,
        "attention": "blocks.*.attention.core",
        "sequence": {"tokens": 1, "labels": 1},
        "num_heads": HEADS,
        "num_kv_heads": HEADS,
        "seq_len": T,
    }


def spec_of(kind: str) -> dict[str, Any]:
    """The spec of a job that trains it."""
    return {
        "task": "planned_tasks:Planned",
        "model": {"kind": kind},
        "plan": plan_of(kind),
        "batch": {"global_size": 8, "micro_size": 2},
        "stop": {"steps": 3},
    }
