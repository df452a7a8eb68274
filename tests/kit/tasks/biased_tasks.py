"""A model whose column layers have biases: in a layout with tp and shards both axes split their only dim."""

from typing import Any

import torch
from torch import nn

PLAN = {
    "blocks": "blocks",
    "num_blocks": 2,
    "first": ["inlet"],
    "last": ["outlet"],
    "hidden_size": 12,
    "tensor": {"blocks.*.up": "column", "blocks.*.down": "row"},
    "widths": {"width of a block": 20},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(12, 20)
        self.down = nn.Linear(20, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        widened: torch.Tensor = self.down(nn.functional.gelu(self.up(x)))
        return x + widened


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(8, 12)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.outlet = nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        result: torch.Tensor = self.outlet(x)
        return result


class Points(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.sin(torch.arange(1, 9) * (index + 1.0))
        return x, torch.stack([x[:3].sum(), x[3:].prod(), x.max()])


class Biased:
    build_optimizer = None

    def __init__(self, *, model: dict[str, Any], data: dict[str, Any], seed: int) -> None:
        pass

    def build_model(self) -> nn.Module:
        return Stack()

    def build_dataset(self, split: str) -> Points | None:
        return Points() if split == "train" else None

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(model(x), y)
