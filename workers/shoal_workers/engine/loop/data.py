"""Where the micro-batches of a loop come from: chooses by what `run.batches` was given.

    data set with a length and items     samples.py, in an order of Shoal's own
    DataLoader over such a data set      samples.py, in the order of its sampler
    other iterables with a state         streams.py, one stream that all ranks read
    function of (stream, num_streams)    streams.py, a stream of its own for each number

Raises TypeError or ValueError for everything else, with what to do instead. Called by `Run`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate
from torch.utils.data.distributed import DistributedSampler

from shoal_workers.contract.batch_partition import micro_batches_of_rank
from shoal_workers.engine.loop.samples import (
    EpochOrder,
    Fetch,
    LoaderOrder,
    Order,
    Samples,
    ShuffledOrder,
    Workers,
)
from shoal_workers.engine.loop.streams import Stream, StreamPlan, Streams, StreamStates, streams_for
from shoal_workers.engine.process.data_processes import DataProcesses
from shoal_workers.engine.sample_order import training_order

T = TypeVar("T")


Source = Samples | Streams
"""This rank's micro-batches, step after step."""


@dataclass(frozen=True, slots=True)
class Epoch:
    """An epoch of `run.epochs`."""

    number: int
    first_step: int
    """Completed steps at its beginning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The arguments of `run.batches`, and the epoch in which it is called."""

    global_size: int | None = None
    micro_size: int | None = None
    collate: Callable[[list[Any]], Any] | None = None
    num_workers: int | None = None
    prefetch_factor: int | None = None
    num_streams: int | None = None
    epoch: Epoch | None = None

    @property
    def step_size(self) -> int:
        """Samples of a step.

        Raises:
            ValueError: nothing says it.
        """
        if self.global_size is None:
            raise ValueError(
                "run.batches(): global_size is missing. Give the number of samples of a step, over all ranks. It may "
                "be left out for a DataLoader within run.epochs(): each of its batches is then a step."
            )
        return self.global_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """Who reads."""

    rank: int
    world_size: int
    max_workers: int
    seed: int
    device: torch.device
    check: Callable[[], None]
    """Raises if the group is over."""
    processes: DataProcesses
    states: StreamStates
    first_look: Callable[[Any, Any, Any], None] | None = None
    """See `Samples`."""


def source_of(data: Any, wanted: Wanted, reader: Reader, source: int) -> Source:
    """Opens the data.

    Args:
        source: how many others the loop has opened before.
    """
    if isinstance(data, DataLoader):
        _refuse(wanted, "num_workers", "prefetch_factor", "collate", because="a DataLoader has its own")
    if is_stream(data):
        if wanted.epoch is not None:
            raise ValueError(
                f"run.batches(): {type(data).__name__} is a stream, whose length is not known, so run.epochs() cannot "
                "divide it. Iterate over run.batches() outside of run.epochs(), or give a data set with a length."
            )
        return _streams(data, wanted, reader, source)
    _refuse(wanted, "num_streams", because=f"{type(data).__name__} is read by index")
    return _of_loader(data, wanted, reader) if isinstance(data, DataLoader) else _of_dataset(data, wanted, reader)


def _of_dataset(dataset: Any, wanted: Wanted, reader: Reader) -> Samples:
    size = micro_size_of(wanted, reader)
    order: Order = ShuffledOrder(dataset, wanted.step_size, size, reader.seed)
    if wanted.epoch is not None:
        num, epoch = len(dataset), wanted.epoch.number
        indices = training_order(dataset, range(epoch * num, (epoch + 1) * num), seed=reader.seed)
        order = EpochOrder(wanted.epoch.first_step, _divided(_divided(indices, size), wanted.step_size // size))
    workers = Workers(wanted.num_workers or 0, wanted.prefetch_factor)
    return _samples(Fetch(dataset, wanted.collate or default_collate), order, size, workers, wanted, reader)


def _of_loader(loader: DataLoader[Any], wanted: Wanted, reader: Reader) -> Samples:
    samplers = (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    if divided := next((sampler for sampler in samplers if isinstance(sampler, DistributedSampler)), None):
        raise ValueError(
            f"run.batches(): the loader has a {type(divided).__name__}, which gives each rank its share, and Shoal "
            "divides the batches itself. Use a sampler of the whole data set, or shuffle=True."
        )
    epoch = wanted.epoch
    if epoch is not None and wanted.global_size is None:
        # Each batch of the loader is a step: the ranks divide what the program computes at once in one process.
        batches = LoaderOrder(loader, 1, reader.seed).batches(epoch.number)
        wanted = replace(wanted, global_size=max(map(len, batches)))
        size = micro_size_of(wanted, reader)
        order: Order = EpochOrder(epoch.first_step, [_divided(batch, size) for batch in batches])
    else:
        size = micro_size_of(wanted, reader, _batch_size(loader))
        num = wanted.step_size // size
        order = loader_order = LoaderOrder(loader, num, reader.seed)
        if epoch is not None:
            order = EpochOrder(epoch.first_step, _divided(loader_order.batches(epoch.number), num))
    workers = Workers(
        loader.num_workers,
        loader.prefetch_factor,
        loader.worker_init_fn,
        loader.multiprocessing_context,
        pin_memory=loader.pin_memory and reader.device.type == "cuda",
    )
    fetch = Fetch(loader.dataset, loader.collate_fn, is_batched=loader.batch_sampler is not None)
    return _samples(fetch, order, size, workers, wanted, reader)


def _samples(fetch: Fetch, order: Order, size: int, workers: Workers, wanted: Wanted, reader: Reader) -> Samples:
    num = wanted.step_size // size
    return Samples(
        fetch,
        order,
        micro_batches_of_rank(num, reader.rank, reader.world_size),
        num,
        workers=workers,
        seed=reader.seed,
        check=reader.check,
        processes=reader.processes,
        first_look=reader.first_look,
    )


def _streams(data: Any, wanted: Wanted, reader: Reader, source: int) -> Streams:
    _refuse(
        wanted,
        "num_workers",
        "prefetch_factor",
        because="a stream is read by torchdata's StatefulDataLoader, which has it",
    )
    known = len(reader.states.of(source))
    if _is_function(data):
        num_streams = wanted.num_streams or known or max(reader.max_workers, reader.world_size)
        made: dict[int, Any] = {}

        def stream_of(number: int) -> Any:
            if number not in made:
                made[number] = data(number, num_streams)
            return made[number]

        stream = stream_of(min(reader.rank, num_streams - 1))
        size = wanted.micro_size or _batch_size(stream) or max(1, wanted.step_size // num_streams)
        plan = streams_for(wanted.step_size, size, num_streams, reader.world_size)
    else:
        _refuse(wanted, "num_streams", because="this is one stream. Give a function of (stream, num_streams)")

        def stream_of(number: int) -> Any:
            return data

        size = micro_size_of(wanted, reader, _batch_size(data))
        plan = StreamPlan(1, wanted.step_size // size, is_shared=True)
    if known not in (0, plan.num_streams):
        raise ValueError(
            f"run.batches(): num_streams {plan.num_streams}, and the state to go on from is that of {known} streams. "
            "Their number stays the same as long as the job lives."
        )
    return Streams(
        lambda number: Stream(stream_of(number), size, wanted.collate),
        plan,
        rank=reader.rank,
        world_size=reader.world_size,
        seed=reader.seed,
        source=source,
        states=reader.states,
        processes=reader.processes,
    )


def micro_size_of(wanted: Wanted, reader: Reader, batch_size: int | None = None) -> int:
    """Samples of a micro-batch. `batch_size`: what the loader says."""
    global_size, micro_size = wanted.step_size, wanted.micro_size or batch_size
    if batch_size is not None and micro_size != batch_size:
        raise ValueError(
            f"run.batches(): micro_size {micro_size}, and the loader has batch_size {batch_size}. Leave micro_size out."
        )
    if micro_size is None:
        most = max(reader.max_workers, reader.world_size)
        fitting = [n for n in range(1, global_size + 1) if global_size % n == 0 and global_size // n >= most]
        micro_size = fitting[-1] if fitting else 1
    name = "micro_size" if batch_size is None else "the loader's batch_size"
    if global_size % micro_size:
        raise ValueError(
            f"run.batches(): global_size {global_size} is not a multiple of {name} {micro_size}. Choose one that "
            "divides it."
        )
    if global_size // micro_size < reader.world_size:
        raise ValueError(
            f"run.batches(): global_size {global_size} / {name} {micro_size} = {global_size // micro_size} "
            f"micro-batches for {reader.world_size} ranks: some would have nothing to do. Lower {name}, or "
            "elasticity.max_workers."
        )
    return micro_size


def _divided(items: Sequence[T], size: int) -> list[Sequence[T]]:
    return [items[first : first + size] for first in range(0, len(items), size)]


def _batch_size(data: Any) -> int | None:
    """Samples in a batch, if the loader says it; otherwise `micro_size` has to."""
    if not isinstance(data, DataLoader):
        return None
    return data.batch_size or getattr(data.batch_sampler, "batch_size", None)


def _is_function(data: Any) -> bool:
    return callable(data) and not hasattr(data, "__iter__") and not hasattr(data, "__getitem__")


def is_stream(data: Any) -> bool:
    """Return whether the data can only be read on, so that its state is part of that of the loop."""
    if _is_function(data):
        return True
    if isinstance(data, DataLoader):
        return isinstance(data.dataset, IterableDataset)
    if isinstance(data, IterableDataset):
        return True
    return not (hasattr(data, "__len__") and hasattr(data, "__getitem__"))


def _refuse(wanted: Wanted, *names: str, because: str) -> None:
    for name in names:
        if getattr(wanted, name) is not None:
            raise ValueError(f"run.batches(): {name}={getattr(wanted, name)!r}, but {because}. Leave it out.")
