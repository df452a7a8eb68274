"""The undisturbed run in plain torch: one process, no groups, no sharding, no part of the engine.

Shares with the engine only pure functions (the samples of a micro-batch, also by length, and its seed), the tasks, and
the values of initial weights.
"""

import importlib
import math
import random
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import torch
from torch.utils._pytree import tree_map_only
from torch.utils.data import default_collate

from kit.device import DEVICE
from kit.worlds.plain_optimizers import plain_optimizer
from shoal_workers.contract.batch_partition import randomness_seed, sample_at, sample_positions
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.engine.length_buckets import LengthBuckets
from shoal_workers.engine.model.draw import Box, draw
from shoal_workers.engine.model.fast_build import build_undrawn
from shoal_workers.engine.sample_order import validation_order
from shoal_workers.tasks.feed_forward import forget_load, move_biases, set_share_of_step


def losses(spec_data, steps):
    """Loss, gradient norm, lr and the task's metrics by step."""
    return train(spec_data, steps)[0]


def validation_loss(spec_data, steps):
    """Mean over the drawn samples of the validation split after that number of steps, and the losses by step."""
    seen, spec, task, model = train(spec_data, steps)
    if spec.optimizer.ema_decay is not None:
        model.load_state_dict(model.averages, strict=False)
    each = _validated(spec, task, model)
    return sum(loss.item() for loss, *_ in each) / sum(
        1.0 if weight is None else float(weight) for _, weight, _ in each
    ), seen


def validation_metrics(spec_data, steps):
    """As `validation_loss`, of the task's metrics."""
    _, spec, task, model = train(spec_data, steps)
    each = [(1.0 if weight is None else float(weight), values) for _, weight, values in _validated(spec, task, model)]
    total = sum(weight for weight, _ in each)
    return {name: sum(weight * float(values[name]) for weight, values in each if weight) / total for name in each[0][1]}


def _validated(spec, task, model):
    data = task.build_dataset("validation")
    if _has_buckets(data):
        samples = _samples(data, range(spec.validation.samples), spec.seed)
    else:
        samples = [data[index] for index in validation_order(data, spec.validation.samples, seed=spec.seed)]
    with torch.no_grad():
        return [_split(task.loss(model.eval(), _on_device(_collate(task)([sample])))) for sample in samples]


def train(spec_data, steps, ranks=None):
    """What was seen in each step, the spec, the task, and the model. `ranks`: what adds gradients up as ranks do."""
    spec = parse_spec({"task": "tiny_tasks:Counting", **spec_data})
    torch.set_num_threads(1)  # like the workers
    task = _task(spec)
    collate = _collate(task)
    data = task.build_dataset("train")
    if spec.data.get("changes"):
        data.change_weights(task.text.wanted_weights, spec.batch.global_size)
    model = whole_model(task, spec.seed).to(DEVICE)
    o, total_steps = spec.optimizer, spec.stop.steps
    optimizer = _optimizer(spec, task, model)

    def factor(step):
        warmup = spec.schedule.warmup_steps
        if step < warmup:
            return (step + 1) / warmup
        half = 0.5 * (1 + math.cos(math.pi * (step + 1 - warmup) / (total_steps - warmup)))
        return spec.schedule.min_lr_ratio + (1 - spec.schedule.min_lr_ratio) * half

    if spec.schedule.is_path:
        kind = getattr(torch.optim.lr_scheduler, spec.schedule.name.rpartition(".")[2])
        scheduler = kind(optimizer, **spec.schedule.args)
    else:
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    seen = {}
    moving = getattr(task, "moving", ())
    for step in range(steps):
        optimizer.zero_grad()
        update, batch = _updated(task, step)
        before = {name: one.clone() for name, one in model.named_buffers() if name in moving}
        changes = {name: torch.zeros_like(one, dtype=torch.float64) for name, one in before.items()}
        forget_load(model)
        total, weights, metrics, embeddings = 0.0, [], {}, []
        for index in range(spec.batch.num_micro_batches):
            seed = randomness_seed(spec.seed, step, index)
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed & 0xFFFFFFFF)
            positions = sample_positions(
                batch, index, global_size=spec.batch.global_size, micro_size=spec.batch.micro_size
            )
            samples = _samples(data, positions, spec.seed)
            set_share_of_step(model, 1 / spec.batch.num_micro_batches)
            if hasattr(task, "embed"):
                embeddings.append(task.embed(model, _on_device(collate(samples))))
                _take_changes(model, before, changes, spec.batch.num_micro_batches)
                continue
            with torch.autocast(DEVICE, torch.bfloat16, enabled=spec.precision == "bf16"):
                loss, weight, values = _split(_loss(task, model, _on_device(collate(samples)), update))
            share = 1 / spec.batch.num_micro_batches
            if weight is None:
                loss = loss / spec.batch.num_micro_batches
            else:
                share = float(weight)
                weights.append(share)
            loss.backward()
            if ranks is not None:
                ranks.after(index, model)
            _take_changes(model, before, changes, spec.batch.num_micro_batches)
            total += loss.item()
            for name, value in values.items():
                metrics[name] = metrics.get(name, 0.0) + (float(value) * share if share else 0.0)
        if embeddings:
            torch.manual_seed(randomness_seed(spec.seed, step, spec.batch.num_micro_batches))
            loss, _, metrics = _split(task.batch_loss(*map(torch.cat, zip(*embeddings, strict=True))))
            loss.backward()
            total, metrics = loss.item(), {name: float(value) for name, value in metrics.items()}
        if weights:
            total, metrics = total / sum(weights), {name: value / sum(weights) for name, value in metrics.items()}
            for parameter in model.parameters():
                if parameter.grad is not None:  # a frozen one has none
                    parameter.grad /= sum(weights)
        for name, parameter in model.named_parameters() if update else ():
            if not any(fnmatchcase(name, pattern) for pattern in _patterns(task, update)):
                parameter.grad = None
        if ranks is not None:
            ranks.add_up(step, model)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), o.clip_norm or math.inf)
        lr = optimizer.param_groups[0]["lr"]
        if o.ema_decay is not None and step == 0:
            averages = {name: one.detach().clone() for name, one in model.named_parameters()}
        optimizer.step()
        if o.ema_decay is not None:
            for name, one in model.named_parameters():
                averages[name] = o.ema_decay * averages[name] + (1 - o.ema_decay) * one.detach()
        move_biases(model)
        scheduler.step()
        _apply_changes(model, before, changes)
        seen[step + 1] = (total, float(norm), lr, metrics)
    if o.ema_decay is not None:
        model.averages = averages
    return seen, spec, task, model


def switched_losses(before_data, after_data, switch, steps):
    """Loss by step, if the optimizer of the second spec takes over the state of the first one's after some steps. One
    micro-batch is as good as another here: the tasks draw nothing. Constant rate."""
    spec = parse_spec(before_data)
    torch.set_num_threads(1)
    task, seen = _task(spec), {}
    data, model = task.build_dataset("train"), whole_model(task, spec.seed).to(DEVICE)
    optimizer = _optimizer(spec, _task(spec), model)
    for step in range(steps):
        if step == switch:
            spec, state = parse_spec(after_data), optimizer.state
            optimizer = _optimizer(spec, _task(spec), model)
            optimizer.state.update(state)
        optimizer.zero_grad()
        size = spec.batch.global_size
        positions = sample_positions(step, 0, global_size=size, micro_size=size)
        samples = [data[sample_at(p, num_samples=len(data), seed=spec.seed)] for p in positions]
        loss = task.loss(model, _on_device(_collate(task)(samples)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), spec.optimizer.clip_norm or math.inf)
        optimizer.step()
        seen[step + 1] = loss.item()
    return seen


def _has_buckets(data):
    return getattr(data, "tokens_per_micro_batch", None) is not None


def _samples(data, positions, seed):
    if _has_buckets(data):
        buckets = LengthBuckets(data, seed)
        return [data[index] for at in positions for index in buckets.members(at)]
    return [data[index] for index in _indices(data, positions, seed)]


def _updated(task, step):
    """The optimizer that a step updates, if a task has several, and the number of the batch that it reads."""
    if not hasattr(task, "training_step"):
        return None, step
    order = list(getattr(task, "updates", task.optimizers))
    batch, served = -1, set(order)
    for number in range(step + 1):
        name = order[number % len(order)]
        if name in served or not number % len(order):
            batch, served = batch + 1, set()
        served.add(name)
    return name, batch


def _patterns(task, name):
    value = task.optimizers[name]
    return [value] if isinstance(value, str) else value


def _loss(task, model, batch, update):
    if update is None:
        return task.loss(model, batch)
    value = task.training_step(model, batch, None)[update]
    loss, *rest = returned if isinstance(returned := value(), tuple) else (returned,)
    metrics = rest.pop() if rest and isinstance(rest[-1], dict) else {}
    mean = loss.detach() / rest[0] if rest else loss.detach()
    return loss, *rest, {**metrics, f"loss_{update}": mean}


def _indices(data, positions, seed):
    if hasattr(data, "samples_at"):
        return data.samples_at(positions, seed)
    return [sample_at(p, num_samples=len(data), seed=seed) for p in positions]


def _optimizer(spec, task, model):
    o = spec.optimizer
    if getattr(task, "build_optimizer", None) is not None:
        return task.build_optimizer(model, o.model_dump())
    return plain_optimizer(o, model)


def _take_changes(model, before, changes, num_micro_batches):
    """Add up what a micro-batch has changed, and put the step's buffers back."""
    for name, buffer in model.named_buffers():
        if name in before:
            change = buffer.double() - before[name].double()
            changes[name] += change / num_micro_batches if buffer.is_floating_point() else change
            buffer.copy_(before[name])


def _apply_changes(model, before, changes):
    for name, buffer in model.named_buffers():
        if name in before:
            value = before[name].double() + changes[name]
            buffer.copy_(value != 0 if buffer.dtype is torch.bool else value)


def whole_model(task, seed):
    """With all weights in one process; those of a task with `deferred_init` are drawn by element. Reads no file."""

    def build():
        torch.manual_seed(seed)
        return task.build_model()

    undrawn = build_undrawn(build) if getattr(task, "deferred_init", False) else None
    if undrawn is None:
        return build()
    model, distributions = undrawn
    for name, parameter in model.named_parameters():
        if name in distributions:
            shape = tuple(parameter.shape)
            draw(distributions[name], seed, name, Box(shape, (0,) * len(shape), shape), parameter.detach())
    return model


def _split(returned):
    """Loss, weight or None, metrics."""
    loss, *rest = returned if isinstance(returned, tuple) else (returned,)
    metrics = rest.pop() if rest and isinstance(rest[-1], dict) else {}
    return loss, *(rest or [None]), {name: torch.as_tensor(value).detach() for name, value in metrics.items()}


def _on_device(batch):
    return tree_map_only(torch.Tensor, lambda one: one.to(DEVICE), batch)


def _collate(task):
    return getattr(task, "collate", default_collate)


def _task(spec):
    module, _, name = spec.task.partition(":")
    folders = [str(Path(__file__).parents[1] / name) for name in ("tasks", "ray_tasks")]
    sys.path[:0] = folders
    try:
        return getattr(importlib.import_module(module), name)(model=spec.model, data=spec.data, seed=spec.seed)
    finally:
        del sys.path[: len(folders)]
