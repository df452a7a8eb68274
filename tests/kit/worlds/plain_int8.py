"""The ranks of a plain loop that add up gradients in 8 bits, in one process: block by block, in NumPy."""

import numpy as np
import torch

from shoal_workers.contract.batch_partition import micro_batches_of_rank, randomness_seed
from shoal_workers.engine.group.rounded_sums import _STREAM

BLOCK = 128


class PlainInt8:
    """Given to `plain_reference.train`. All gradients of the model fit into one bucket."""

    def __init__(self, world_size, num_micro_batches, seed):
        self.world_size, self.seed, self.step, self.gradients = world_size, seed, 0, []
        shares = [micro_batches_of_rank(num_micro_batches, rank, world_size) for rank in range(world_size)]
        self.last = {max(one.index for one in share if one.weight) for share in shares}

    def after(self, index, model):
        """The last micro-batch of a rank ends its gradient."""
        if index in self.last:
            self.gradients.append(np.concatenate([p.grad.numpy().ravel() for p in reversed([*model.parameters()])]))
            model.zero_grad()

    def add_up(self, step, model):
        self.step, num = step, self.gradients[0].size
        size = -(-num // (self.world_size * BLOCK)) * BLOCK
        parts = [
            self.rounded(np.pad(gradient, (0, size * self.world_size - num)), 0, rank).reshape(self.world_size, size)
            for rank, gradient in enumerate(self.gradients)
        ]
        sums = [parts[0][rank].copy() for rank in range(self.world_size)]
        for rank, total in enumerate(sums):
            for part in parts[1:]:
                total += part[rank]
        flat = torch.from_numpy(np.concatenate([self.rounded(total, 1, rank) for rank, total in enumerate(sums)]))
        for parameter in reversed([*model.parameters()]):
            here, flat = flat[: parameter.numel()], flat[parameter.numel() :]
            parameter.grad = here.view_as(parameter).clone()
        self.gradients.clear()

    def rounded(self, values, number, rank):
        seed = randomness_seed(self.seed ^ _STREAM, self.step, number * self.world_size + rank)
        noise = torch.rand(values.size, generator=torch.Generator().manual_seed(seed)).numpy()
        result = np.empty_like(values)
        for begin in range(0, values.size, BLOCK):
            at = slice(begin, begin + BLOCK)
            scale = max(np.abs(values[at]).max() / np.float32(127), np.finfo(np.float32).tiny)
            steps = np.floor(values[at] / scale + noise[at])
            result[at] = np.minimum(steps, np.float32(127)) * scale
        return result
