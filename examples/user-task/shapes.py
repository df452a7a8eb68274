"""A user's task: classify circles, squares and triangles. It imports nothing but torch."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIZE = 24  # pixels


class DrawnShapes(torch.utils.data.Dataset):
    """Image i depends on i only, so it is equal on every worker: ((1, SIZE, SIZE) pixels, class)."""

    def __init__(self, first: int, num_images: int, noise: float) -> None:
        self.first, self.num_images, self.noise = first, num_images, noise

    def __len__(self) -> int:
        return self.num_images

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        random = torch.Generator().manual_seed(self.first + index)
        kind = int(torch.randint(3, (), generator=random))
        scale, least = torch.tensor([6.0, 6.0, 4.0]), torch.tensor([9.0, 9.0, 4.0])
        x0, y0, radius = (torch.rand(3, generator=random) * scale + least).tolist()
        y, x = torch.meshgrid(torch.arange(SIZE) - y0, torch.arange(SIZE) - x0, indexing="ij")
        inside = [
            x**2 + y**2 < radius**2,  # circle
            torch.maximum(x.abs(), y.abs()) < 0.9 * radius,  # square
            (y < radius) & (y > 2 * x.abs() - radius),  # triangle
        ][kind]
        return inside.float()[None] + self.noise * torch.randn(1, SIZE, SIZE, generator=random), kind


class Shapes:
    """The task contract: model, data and loss."""

    def __init__(self, model: dict, data: dict, seed: int) -> None:
        self.width = model.get("width", 16)
        self.num_images, self.noise = data.get("num_images", 4096), data.get("noise", 0.2)
        self.first = seed * 10_000_000

    def build_model(self) -> nn.Module:
        w = self.width
        return nn.Sequential(
            nn.Conv2d(1, w, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Conv2d(w, 2 * w, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(2 * w * (SIZE // 4) ** 2, 3),
        )

    def build_dataset(self, split: str) -> DrawnShapes:
        if split == "train":
            return DrawnShapes(self.first, self.num_images, self.noise)
        return DrawnShapes(self.first + self.num_images, 256, self.noise)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, kinds = batch
        return F.cross_entropy(model(images).float(), kinds)
