"""A user's task with a plan: predict the next values of a wave from the last ones, with residual blocks.

The code contains no parallelism. The plan in waves.yaml names the modules that may be split.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PAST, FUTURE = 32, 8  # values


class Waves(torch.utils.data.Dataset):
    """Sample i is a sum of three sines that depends on i only: (past, future)."""

    def __init__(self, first: int, num_waves: int) -> None:
        self.first, self.num_waves = first, num_waves

    def __len__(self) -> int:
        return self.num_waves

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        random = torch.Generator().manual_seed(self.first + index)
        frequency, phase = torch.rand(3, 1, generator=random) + 0.1, torch.rand(3, 1, generator=random) * 6.28
        wave = torch.sin(frequency * torch.arange(PAST + FUTURE) + phase).sum(0)
        return wave[:PAST], wave[PAST:]


class Block(nn.Module):
    """(B, width) -> (B, width)"""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Forecaster(nn.Module):
    def __init__(self, width: int, hidden: int, num_blocks: int) -> None:
        super().__init__()
        self.inlet = nn.Linear(PAST, width)
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(num_blocks))
        self.outlet = nn.Linear(width, FUTURE)

    def forward(self, past: Tensor) -> Tensor:
        x = self.inlet(past)
        for block in self.blocks:
            x = block(x)
        return self.outlet(x)


class Forecast:
    """The task contract: model, data and loss."""

    def __init__(self, model: dict, data: dict, seed: int) -> None:
        self.sizes = model.get("width", 64), model.get("hidden", 256), model.get("num_blocks", 4)
        self.num_waves, self.first = data.get("num_waves", 8192), seed * 10_000_000

    def build_model(self) -> nn.Module:
        return Forecaster(*self.sizes)

    def build_dataset(self, split: str) -> Waves:
        return Waves(self.first, self.num_waves) if split == "train" else Waves(self.first + self.num_waves, 256)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        past, future = batch
        return F.mse_loss(model(past).float(), future)
