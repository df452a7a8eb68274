"""Decoders and their plans as pure data, and the layouts in which they are drawn to be trained. No torch."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Decoder:
    """The plain value of each choice is its default."""

    blocks: int = 2
    heads: int = 2
    kv_heads: int = 2
    head_width: int = 4
    hidden: int = 12
    vocabulary: int = 16
    length: int = 8
    bias: bool = False
    norm: str = "layer"
    tied: str = "none"
    """named and unnamed: table and head; frozen: they, and not trained; blocks: one weight of blocks 0 and 1."""
    option: str = "none"
    """A name in the table of options."""
    positions: str = "none"
    loss: str = "plain"
    experts: int = 0
    are_experts_split: bool = False
    is_sequence_split: bool = True
    """The plan splits activations along the sequence."""
    special: str = "none"

    @property
    def width(self) -> int:
        return self.heads * self.head_width


CHOICES: dict[str, tuple[Any, ...]] = {
    "blocks": (2, 3, 4),
    "head_width": (4, 3, 5),
    "hidden": (12, 24),
    "vocabulary": (16, 13, 17),
    "bias": (False, True),
    "norm": ("layer", "rms"),
    "tied": ("none", "none", "named", "unnamed", "frozen", "blocks"),
    "option": ("none", "none", "padding_idx", "scale_grad_by_freq", "scaled"),
    "positions": ("none", "none", "batch", "arange"),
    "loss": ("plain", "plain", "smoothing", "ignored"),
    "is_sequence_split": (True, False),
    "special": (
        *("none",) * 6,
        "fused",
        "head_norm",
        "partial",
        "layer_scale",
        "scaled_linear",
        "scale_inside",
        "between",
        "skip",
        "pool",
        "frozen_block",
    ),
}
_LAYOUTS: tuple[dict[str, Any], ...] = (
    {"tp": 2},
    {"tp": 2},
    {"pp": 2},
    {"pp": 2},
    {"cp": 2},
    {"tp": 4},
    {"tp": 3},
    {"pp": 3},
    {"pp": 4},
    {"pp": 2, "tp": 2},
    {"dp_shard": 2, "tp": 2},
    {"dp_replicate": 2, "tp": 2},
    {"pp": 2, "dp_shard": 2},
    {"pp": 2, "dp_replicate": 2},
    {"cp": 2, "tp": 2},
    {"cp": 2, "dp_shard": 2},
    {"pp": 2, "cp": 2},
    {"dp_shard": 2},
    {"dp_shard": 3},
)
_WITH_EXPERTS: tuple[dict[str, Any], ...] = (
    {"dp_shard": 2, "ep": 2},
    {"dp_shard": 4, "ep": 4},
    {"dp_shard": 4, "ep": 2},
    {"dp_shard": 2, "ep": 2, "tp": 2},
    {"pp": 2, "dp_shard": 2, "ep": 2},
    {"dp_shard": 2, "ep": 2, "cp": 2},
)


def draw_decoder(source: random.Random) -> Decoder:
    heads = source.choice((2, 4, 3))
    kv_heads = source.choice([n for n in (heads, heads, 1, 2) if heads % n == 0])
    chosen = {name: source.choice(choices) for name, choices in CHOICES.items()}
    if chosen["special"] == "fused":
        kv_heads = heads
    experts = source.choice((0, 0, 4))
    if experts:
        chosen["is_sequence_split"] = True
    split = bool(experts) and source.random() < 0.5
    return Decoder(heads=heads, kv_heads=kv_heads, experts=experts, are_experts_split=split, **chosen)


def layouts(source: random.Random, decoder: Decoder) -> Iterator[dict[str, Any]]:
    """In a drawn order, without end; the caller takes the first that is legal."""
    while True:
        layout = dict(source.choice(_LAYOUTS + (2 * _WITH_EXPERTS if decoder.experts else ())))
        if layout.get("pp", 1) > 1:
            layout["schedule"] = source.choice(("1f1b", "gpipe", "interleaved_1f1b", "zbv", "dualpipev"))
            num = layout["pp"] * (1 if layout["schedule"] in ("1f1b", "gpipe") else 2)
            base, extra = divmod(decoder.blocks, num)
            layout["stages"] = [base + (stage < extra) for stage in range(num)]
        if layout.get("cp", 1) > 1:
            layout["context"] = source.choice(("all_gather", "ulysses"))
        layout["recompute"] = source.choice(("none", "none", "selective", "full"))
        layout["shard"] = source.choice(("full", "full", "gradients", "optimizer"))
        yield layout


def plan_of(decoder: Decoder) -> dict[str, Any]:
    """The `plan` section that a user would write."""
    d = decoder
    columns = ("qkv",) if d.special == "fused" else ("query", "key", "value")
    tensor = {f"blocks.*.attention.{name}": "column" for name in columns} | {"blocks.*.attention.out": "row"}
    if not d.experts:
        tensor |= {"blocks.*.feed_forward.up": "column", "blocks.*.feed_forward.down": "row"}
    if d.is_sequence_split:
        tensor |= {
            "embedding": "embedding",
            "blocks.*.norm1": "sequence",
            "blocks.*.attention": "gather",
            "blocks.*.norm2": "sequence",
            "blocks.*.feed_forward": "whole" if d.experts else "gather",
            "norm": "sequence",
            "head": "head",
        }
    if d.special == "partial":
        tensor["blocks.*.attention.head_norm"] = "partial"
    plan: dict[str, Any] = {
        "blocks": "blocks",
        "num_blocks": d.blocks,
        "first": ["embedding", "places"] if d.positions != "none" else ["embedding"],
        "last": ["norm", "head"],
        "hidden_size": d.width,
        "tensor": tensor,
        "attention": "blocks.*.attention.core",
        "sequence": {"tokens": 1, "labels": 1, **({"positions": 1} if d.positions == "batch" else {})},
        "num_heads": d.heads,
        "num_kv_heads": d.kv_heads,
        "seq_len": d.length,
        "widths": {"model.hidden": d.hidden},
    }
    if d.tied in ("named", "frozen"):
        plan["tied"] = {"head.weight": "embedding.weight"}
    if d.experts:
        plan |= {"experts": "blocks.*.feed_forward.experts", "num_experts": d.experts}
    return plan


def world_of(layout: Mapping[str, Any]) -> int:
    """Workers that a layout needs."""
    world = 1
    for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp"):
        world *= layout.get(axis, 1)
    return world
