"""Small decoders with plans, as users write them: what tp, pp, cp and ep split. They import no part of Shoal."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kit.fuzz.plans import Decoder

IGNORED = -100


class Chain(torch.utils.data.Dataset):
    """Token i + 1 follows from token i and the sample's stride: {tokens, labels, positions}, each (T,) int64."""

    def __init__(self, first: int, size: int, decoder: Decoder) -> None:
        self.first, self.size, self.decoder = first, size, decoder

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        d = self.decoder
        generator = torch.Generator().manual_seed(self.first + index)
        start, stride = torch.randint(d.vocabulary, (), generator=generator), 1 + index % 3
        line = (start + stride * torch.arange(d.length + 1)) % d.vocabulary
        tokens, labels = line[:-1].clone(), line[1:].clone()
        if d.option == "padding_idx":
            tokens[d.length - 1 - index % 3 :] = 0
        if d.loss == "ignored":
            labels[d.length - 1 - index % (d.length // 2) :] = IGNORED
        return {"tokens": tokens, "labels": labels, "positions": torch.arange(d.length)}


class ScaledTable(nn.Embedding):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * 1.5


class ScaledLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 0.7


class Core(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        k, v = (one.repeat_interleave(groups, 1) if groups > 1 else one for one in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Attention(nn.Module):
    def __init__(self, d: Decoder) -> None:
        super().__init__()
        width, self.k = d.width, d.head_width
        self.head_norm = nn.LayerNorm(self.k, eps=0.1) if d.special in ("head_norm", "partial") else nn.Identity()
        if d.special == "fused":
            self.qkv = nn.Linear(width, 3 * width, bias=d.bias)
        else:
            self.query = nn.Linear(width, width, bias=d.bias)
            self.key, self.value = (nn.Linear(width, d.kv_heads * self.k, bias=d.bias) for _ in range(2))
        self.core, self.out = Core(), nn.Linear(width, width, bias=d.bias)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, -1) if hasattr(self, "qkv") else (self.query(x), self.key(x), self.value(x))
        q, k, v = (part.unflatten(-1, (-1, self.k)).transpose(1, 2) for part in parts)
        return self.out(self.core(self.head_norm(q), k, v).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, d: Decoder) -> None:
        super().__init__()
        line = ScaledLinear if d.special == "scaled_linear" else nn.Linear
        self.up, self.down = line(d.width, d.hidden, bias=d.bias), line(d.hidden, d.width, bias=d.bias)
        self.special = d.special
        if d.special == "scale_inside":
            self.scale = nn.Parameter(torch.rand(d.width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.gelu(self.up(x)))
        return y * self.scale if self.special == "scale_inside" else y


class Experts(nn.Module):
    """Tokens (N, D) sorted by expert, and counts (E,)."""

    def __init__(self, d: Decoder) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(d.experts, d.width, d.hidden) * d.width**-0.5)
        self.down = nn.Parameter(torch.randn(d.experts, d.hidden, d.width) * d.hidden**-0.5)
        if d.are_experts_split:
            self.hidden_dims = {"up": 2, "down": 1}

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        parts = torch.split(tokens, counts.tolist())
        return torch.cat([F.gelu(part @ up) @ down for part, up, down in zip(parts, self.up, self.down, strict=True)])


class Mixture(nn.Module):
    """Each token goes to one expert, and the output is weighted by the router."""

    def __init__(self, d: Decoder) -> None:
        super().__init__()
        self.router, self.experts, self.num = nn.Linear(d.width, d.experts, bias=False), Experts(d), d.experts

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).max(-1)
        flat, chosen = x.flatten(0, 1), chosen.flatten()
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=self.num)
        outputs = self.experts(flat.index_select(0, order), counts)
        return torch.zeros_like(flat).index_copy(0, order, outputs).view_as(x) * weights.unsqueeze(-1)


class Block(nn.Module):
    def __init__(self, d: Decoder) -> None:
        super().__init__()
        kind = nn.LayerNorm if d.norm == "layer" else nn.RMSNorm
        self.norm1, self.attention = kind(d.width, eps=0.1), Attention(d)
        self.norm2, self.feed_forward = kind(d.width, eps=0.1), Mixture(d) if d.experts else FeedForward(d)
        self.scale = nn.Parameter(torch.full((d.width,), 0.8)) if d.special == "layer_scale" else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention(self.norm1(x))
        x = x + (y if self.scale is None else y * self.scale)
        return x + self.feed_forward(self.norm2(x))


class Model(nn.Module):
    def __init__(self, d: Decoder) -> None:
        super().__init__()
        self.d = d
        table = ScaledTable if d.option == "scaled" else nn.Embedding
        options = {"padding_idx": {"padding_idx": 0}, "scale_grad_by_freq": {"scale_grad_by_freq": True}}
        self.embedding = table(d.vocabulary, d.width, **options.get(d.option, {}))
        if d.positions != "none":
            self.places = nn.Embedding(d.length, d.width)
        self.blocks = nn.ModuleList(Block(d) for _ in range(d.blocks))
        self.norm = nn.LayerNorm(d.width, eps=0.1)
        self.head = nn.Linear(d.width, d.vocabulary, bias=d.bias and d.tied == "none")
        if d.tied in ("named", "unnamed", "frozen"):
            self.head.weight = self.embedding.weight
        if d.tied == "blocks":
            self.blocks[1].attention.out.weight = self.blocks[0].attention.out.weight
        if d.tied == "frozen":
            self.embedding.weight.requires_grad_(False)
        if d.special == "frozen_block":
            self.blocks[0].requires_grad_(False)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        x = first = self.embedding(tokens)
        match self.d.positions:
            case "batch":
                x = x + self.places(positions)
            case "arange":
                x = x + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
            if self.d.special == "between":
                x = x * 0.9
        if self.d.special == "skip":
            x = x + first
        if self.d.special == "pool":
            x = x - 0.5 * x.mean(1, keepdim=True)
        return self.head(self.norm(x))


def loss_of(d: Decoder, model: nn.Module, batch: dict[str, Tensor], *, has_metrics: bool):
    extra = (batch["positions"],) if d.positions == "batch" else ()
    logits = model(batch["tokens"], *extra).float()
    labels = batch["labels"]
    smoothing = 0.1 if d.loss == "smoothing" else 0.0
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=smoothing, ignore_index=IGNORED)
    if not has_metrics:
        return loss
    return loss, {"accuracy": (logits.argmax(-1) == labels).float().mean()}
