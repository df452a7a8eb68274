"""Islands in plain torch: one process, one loop over the islands, and torch's SGD as the outer step; no part of the
engine but what plain_reference shares with it. It follows a ledger: who sent what to which round, and when it landed.
"""

import math

import torch

from kit.worlds.plain_reference import _collate, _on_device, _optimizer, _samples, _task, whole_model
from shoal_workers.contract.batch_partition import randomness_seed, sample_positions
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.engine.schedule import compute_lr_factor

_TYPES = {"none": torch.float32, "bf16": torch.bfloat16}


def run(spec_data, steps, rounds, landings, shards):
    """Loss by step of each island, and the weights of each after the last step.

    `rounds`: of each round, or by its number, its members: step of the island when it sent, by island. `landings`: of
    each island, the step in which it took a round, by round. `shards`: of each island, into how many slices parameters
    are cut, which counts for sparse differences only.
    """
    spec = parse_spec({"task": "tiny_tasks:Counting", **spec_data})
    torch.set_num_threads(1)
    islands = [_Island(spec, index, landings[index], shards[index]) for index in range(spec.islands.num)]
    for number, members in rounds.items() if isinstance(rounds, dict) else enumerate(rounds):
        written, tokens = {}, {}
        for index, step in sorted(members.items()):
            island = islands[index]
            island.advance(step)
            tokens[index] = step - island.counted
            written[index] = island.send(number, step)
        total = sum(tokens.values())
        for island in islands:
            island.means[number] = [
                sum(tokens[index] / total * values[at] for index, values in written.items())
                for at in range(len(island.outer))
            ]
            island.written[number] = written.get(island.index)
    for island in islands:
        island.advance(steps)
    return [island.seen for island in islands], [island.weights() for island in islands]


class _Island:
    def __init__(self, spec, index, landings, shards):
        self.spec, self.index, self.landings, self.shards = spec, index, landings, shards
        self.task = _task(spec)
        self.data, self.collate = self.task.build_dataset("train"), _collate(self.task)
        self.model = whole_model(self.task, spec.seed)
        self.optimizer = _optimizer(spec, self.task, self.model)
        self.outer = [parameter.detach().clone().requires_grad_() for parameter in self.model.parameters()]
        settings = spec.islands.outer
        self.outer_step = torch.optim.SGD(
            self.outer, lr=settings.lr, momentum=settings.momentum, nesterov=settings.nesterov
        )
        self.residuals = [torch.zeros_like(tensor) for tensor in self.outer]
        self.step, self.counted, self.seen, self.sent = 0, 0, {}, {}
        self.means, self.written = {}, {}

    def advance(self, step):
        while self.step < step:
            self._train()
            for number, landing in self.landings.items():
                if landing == self.step:
                    self._land(number)
            is_over = self.step == self.spec.stop.steps and self.counted and {*self.sent} <= {*self.landings}
            if is_over and max(self.landings) >= self.spec.islands.first_of_all(self.step):
                with torch.no_grad():
                    for parameter, new in zip(self.model.parameters(), self.outer, strict=True):
                        parameter.copy_(new)

    @torch.no_grad()
    def send(self, number, step):
        assert self.step == step
        self.sent[number] = (step, self.weights())
        if self.spec.islands.topology == "pairs":
            return self.weights()
        exact = [
            outer - sent + residual
            for outer, sent, residual in zip(self.outer, self.sent[number][1], self.residuals, strict=True)
        ]
        return [_compressed(difference, self.spec.islands, self.shards) for difference in exact]

    @torch.no_grad()
    def _land_weights(self, number):
        """A round of a pair, or the last one of all, in which weights are exchanged."""
        is_member, before = self.written[number] is not None, [tensor.clone() for tensor in self.outer]
        if is_member:
            self.counted, before = self.sent[number]
        if is_member and number < self.spec.islands.first_of_all(self.spec.stop.steps):
            for outer, sent in zip(self.outer, before, strict=True):
                outer.grad = outer - sent
            self.outer_step.step()
            for outer, mean, sent in zip(self.outer, self.means[number], before, strict=True):
                outer += mean - sent
        else:
            share = 0.5 if number < self.spec.islands.first_of_all(self.spec.stop.steps) else 1
            for outer, mean in zip(self.outer, self.means[number], strict=True):
                outer.copy_((1 - share) * outer + share * mean)
        for parameter, new, old in zip(self.model.parameters(), self.outer, before, strict=True):
            parameter += new - old

    @torch.no_grad()
    def _land(self, number):
        if self.spec.islands.topology == "pairs":
            self._land_weights(number)
            return
        before = [tensor.clone() for tensor in self.outer]
        if self.written[number] is not None:
            self.counted, sent = self.sent[number]
            for at, (outer, own) in enumerate(zip(before, sent, strict=True)):
                if at % self.spec.islands.fragments == number % self.spec.islands.fragments:
                    self.residuals[at] += outer - own
                    self.residuals[at] -= self.written[number][at]
            before = sent
        num = self.spec.islands.fragments
        merged = [at % num == number % num for at in range(len(self.outer))]
        for parameter, mean, is_merged in zip(self.outer, self.means[number], merged, strict=True):
            parameter.grad = mean if is_merged else None
        self.outer_step.step()
        for parameter, new, old, is_merged in zip(self.model.parameters(), self.outer, before, merged, strict=True):
            if is_merged:
                parameter += new - old

    def weights(self):
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    def _train(self):
        spec, total = self.spec, 0.0
        self.optimizer.zero_grad()
        for index in range(spec.batch.num_micro_batches):
            torch.manual_seed(randomness_seed(spec.seed, self.step, index))
            positions = sample_positions(
                self.step * spec.islands.num + self.index,
                index,
                global_size=spec.batch.global_size,
                micro_size=spec.batch.micro_size,
            )
            samples = _samples(self.data, positions, spec.seed)
            loss = self.task.loss(self.model, _on_device(self.collate(samples)))
            loss = (loss[0] if isinstance(loss, tuple) else loss) / spec.batch.num_micro_batches
            loss.backward()
            total += loss.item()
        # The norm of all is of 64 bits, unlike in `clip_grad_norm_`. A last bit of difference in a weight would round a
        # compressed value the other way now and then, and the steps after that amplify it.
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        norm = math.sqrt(sum(gradient.norm().item() ** 2 for gradient in gradients))
        for gradient in gradients:
            gradient.mul_(min(1.0, (spec.optimizer.clip_norm or math.inf) / (norm + 1e-6)))
        for group in self.optimizer.param_groups:
            group["lr"] = spec.optimizer.lr * compute_lr_factor(spec.schedule, self.step, spec.stop.steps)
        self.optimizer.step()
        self.step += 1
        self.seen[self.step] = total


def _compressed(value, spec, num_shards):
    if spec.compress == "sparse":
        shards = [_sparse(chunk, spec.density) for chunk in torch.chunk(value, num_shards)]
        return torch.cat(shards)
    if spec.compress == "int8":
        scale = (value.abs().max() / 127).clamp(min=torch.finfo(torch.float32).tiny)
        return (value / scale).round() * scale
    return value.to(_TYPES[spec.compress]).float()


def _sparse(value, density):
    flat, kept = value.flatten(), torch.zeros(value.numel())
    for first in range(0, len(flat), 4096):
        chunk = flat[first : first + 4096]
        number = max(1, round(density * min(4096, len(flat))))
        largest = chunk.abs().topk(min(number, len(chunk))).indices + first
        kept[largest] = flat[largest]
    scale = (kept.abs().max() / 127).clamp(min=torch.finfo(torch.float32).tiny)
    return ((kept / scale).round() * scale).view_as(value)
