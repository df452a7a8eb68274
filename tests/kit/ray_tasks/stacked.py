"""The tiny task with a model that can be cut along every dense axis, by the plan that the test submits with it."""

from tiny import Tiny
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(12, 20)
        self.down = nn.Linear(20, 12)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.inlet = nn.Linear(8, 12)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.outlet = nn.Linear(12, 3)

    def forward(self, x):
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return self.outlet(x)


class Stacked(Tiny):
    def build_model(self):
        self.builds += 1
        self._strike("build", self.builds)
        return Stack()
