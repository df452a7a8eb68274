"""Streams: data that can only be read on, such as an IterableDataset. What is kept of them is a state at each step.

    partitioned   stream 0 .. num_streams - 1, each read by one rank; a rank may read several, one after the other
    shared        one stream, read whole by every rank, which keeps its own micro-batches of it

Each stream gives equally many micro-batches of every step, so a step has the same samples at every world size. At the
end of a step all ranks exchange the states: any survivor can go on, and a stream may go to another rank. A stream that
ends begins anew, as its next epoch. Called by `Run` through data.py.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

from shoal_workers.contract.batch_partition import MicroBatch, micro_batches_of_rank, randomness_seed
from shoal_workers.engine.generation_ends import DataDiffers
from shoal_workers.engine.group.all_ranks import all_ranks
from shoal_workers.engine.loop.tracked import Stateful, decode_state, encode_state
from shoal_workers.engine.process.data_processes import CONTEXT, DataProcesses
from shoal_workers.engine.randomness import seed_everything
from shoal_workers.torch_internals import tree_leaves

_SEEDED = 0x57EA


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """How the micro-batches of a step come from streams. Pure."""

    num_streams: int
    num_micro_batches: int
    is_shared: bool

    @property
    def per_stream(self) -> int:
        return self.num_micro_batches // self.num_streams

    def own(self, rank: int, world_size: int) -> tuple[MicroBatch, ...]:
        """The micro-batches of a rank; all ranks have equally many, the last ones perhaps with weight 0."""
        if self.is_shared:
            return micro_batches_of_rank(self.num_micro_batches, rank, world_size)
        count = self.per_stream
        streams = micro_batches_of_rank(self.num_streams, rank, world_size)
        return tuple(MicroBatch(stream.index * count + at, stream.weight) for stream in streams for at in range(count))

    def streams_of(self, rank: int, world_size: int) -> tuple[int, ...]:
        """The streams that a rank reads."""
        if self.is_shared:
            return (0,)
        return tuple(
            stream.index for stream in micro_batches_of_rank(self.num_streams, rank, world_size) if stream.weight
        )

    def stream_of(self, micro_batch: int) -> int:
        return 0 if self.is_shared else micro_batch // self.per_stream


class Stream:
    """One stream: what is read next is a function of its state."""

    def __init__(self, data: Any, micro_size: int, collate: Callable[[list[Any]], Any] | None) -> None:
        """`collate`: for a stream of samples; None if the stream has a collate function of its own, or the default is
        meant.

        Raises:
            TypeError: `data` has no state.
        """
        self._data = data
        self._owner = _owner_of(data)
        self._micro_size = micro_size if isinstance(data, IterableDataset) else None
        self._collate = collate or default_collate
        self._iterator: Iterator[Any] | None = None
        self._epoch = 0
        if isinstance(data, DataLoader) and data.num_workers and data.multiprocessing_context is None:
            data.multiprocessing_context = CONTEXT

    def restore(self, text: str) -> None:
        """Goes on from what `state` returned."""
        state = json.loads(text)
        self._epoch = state["epoch"]
        self._begin_epoch()
        self._owner.load_state_dict(decode_state(state["state"]))

    def state(self) -> str:
        """As text."""
        try:
            return json.dumps({"epoch": self._epoch, "state": encode_state(self._owner.state_dict())})
        except TypeError as error:
            raise TypeError(
                f"run.batches(): the state of {type(self._owner).__name__} cannot be kept. {error}"
            ) from None

    def open(self) -> None:
        """A DataLoader draws a random number for its iterator: call it before what is read has its seed."""
        if self._iterator is None:
            self._iterator = iter(self._data)

    def read(self) -> Any:
        """The next micro-batch.

        Raises:
            ValueError: a whole epoch has nothing.
        """
        if self._micro_size is None:
            return self._next()
        return self._collate([self._next() for _ in range(self._micro_size)])

    def close(self, processes: DataProcesses) -> None:
        if self._iterator is not None:
            dropped, self._iterator = [self._iterator], None
            processes.let_go(dropped)

    def _next(self) -> Any:
        for _ in range(2):  # a stream may go on at the end of an epoch
            self.open()
            assert self._iterator is not None
            for item in self._iterator:
                return item
            self._iterator = None
            self._epoch += 1
            self._begin_epoch()
        raise ValueError(f"run.batches(): a whole epoch of {type(self._data).__name__} has nothing to read.")

    def _begin_epoch(self) -> None:
        for data in (self._data, getattr(self._data, "dataset", None)):
            if callable(set_epoch := getattr(data, "set_epoch", None)):
                set_epoch(self._epoch)


class StreamStates:
    """The states of all streams at the end of the last step, on every rank. Part of the state of a loop."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def of(self, source: int) -> dict[int, str]:
        """By stream; empty: it was not read yet."""
        prefix = f"{source}/"
        return {int(key.removeprefix(prefix)): text for key, text in self.texts.items() if key.startswith(prefix)}

    def set(self, source: int, states: Mapping[int, str]) -> None:
        self.texts |= {f"{source}/{stream}": text for stream, text in states.items()}


class Streams:
    """The micro-batches of this rank. Training thread only; all ranks call `end_step`."""

    def __init__(
        self,
        make: Callable[[int], Stream],
        plan: StreamPlan,
        *,
        rank: int,
        world_size: int,
        seed: int,
        source: int,
        states: StreamStates,
        processes: DataProcesses,
    ) -> None:
        self.own, self.epoch = plan.own(rank, world_size), None
        self.num_micro_batches = plan.num_micro_batches
        self.most_workers = plan.num_micro_batches if plan.is_shared else plan.num_streams
        self._plan = plan
        self._seed = seed ^ _SEEDED
        self._source = source
        self._states = states
        self._processes = processes
        self._streams = {number: make(number) for number in plan.streams_of(rank, world_size)}
        known = states.of(source)
        for number, stream in self._streams.items():
            if number in known:
                stream.restore(known[number])
        self._num_read = dict.fromkeys(self._streams, 0)
        """Micro-batches of the present step."""
        self._kept: dict[int, Any] = {}
        self._last: Any = None
        self._first = 0
        """Checksum of the first batch of a shared stream in this generation."""

    def get(self, step: int, number: int, *, again: bool = False) -> Any:
        """The micro-batch `own[number]` of a step. `again`: it may be asked for once more."""
        micro = self.own[number]
        if number in self._kept:
            return self._kept[number]
        if micro.weight:
            self._last = self._read_to(step, micro.index)
        if again:
            self._kept[number] = self._last
        return self._last

    def end_step(self, step: int) -> None:
        """Before the commit of the step that began after `step` others: reads what the loop has left out of it, and
        exchanges the states.

        Raises:
            DataDiffers: ranks read different data from one shared stream.
        """
        if not any(self._num_read.values()):  # it was left, on all ranks
            return
        for stream in self._streams:
            self._read_to(step, (stream + 1) * self._plan.per_stream - 1)
        self._kept, self._last = {}, None
        self._num_read = dict.fromkeys(self._streams, 0)
        own = {number: stream.state() for number, stream in self._streams.items()}
        for rank, (first, states) in enumerate(all_ranks().gather_values((self._first, own))):
            if self._plan.is_shared and (first, states) != (self._first, own):
                raise DataDiffers(
                    f"run.batches(): rank {rank} reads other data than another rank, and every rank has to read the "
                    "same from one stream: Shoal divides it. Leave out what divides it by rank; or give run.batches() "
                    "a function of (stream, num_streams) that makes a stream of its own share."
                )
            self._states.set(self._source, states)

    def close(self) -> None:
        for stream in self._streams.values():
            stream.close(self._processes)

    def _read_to(self, step: int, micro_batch: int) -> Any:
        """Reads up to this micro-batch, and returns it; None if it was read before."""
        stream = self._plan.stream_of(micro_batch)
        first, batch = stream * self._plan.per_stream, None
        for index in range(first + self._num_read[stream], micro_batch + 1):
            self._streams[stream].open()
            seed_everything(randomness_seed(self._seed, step, index))
            batch = self._streams[stream].read()
            self._num_read[stream] += 1
            if self._plan.is_shared and not self._first:
                self._first = _checksum(batch)
        return batch


def _owner_of(data: Any) -> Stateful:
    """What has the state: the stream, or the data set of a DataLoader that reads it in this process."""
    if _is_stateful(data):
        return cast(Stateful, data)
    name = type(data).__name__
    if isinstance(data, DataLoader) and _is_stateful(data.dataset):
        if not data.num_workers:
            return cast(Stateful, data.dataset)
        raise TypeError(
            f"run.batches(): {name} with num_workers={data.num_workers} has its data set in other processes, and no "
            "state_dict(). Use torchdata.stateful_dataloader.StatefulDataLoader, which takes the same arguments; or "
            "num_workers=0."
        )
    whose = f"{type(data.dataset).__name__}, which this {name} reads," if isinstance(data, DataLoader) else name
    raise TypeError(
        f"run.batches(): {whose} has no state_dict() and load_state_dict(), so where it stands would be lost with a "
        "worker. Give it both; or read it with torchdata.stateful_dataloader.StatefulDataLoader, which without them "
        "reads all again up to where it stood. A data set with a length and items needs neither."
    )


def _is_stateful(candidate: Any) -> bool:
    return all(callable(getattr(candidate, name, None)) for name in ("state_dict", "load_state_dict"))


def _checksum(batch: Any) -> int:
    """A number for the tensors, numbers and texts of a batch. Never 0."""
    checksum = 1
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            content = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        elif isinstance(leaf, (bool, int, float, str)):
            content = repr(leaf).encode()
        else:
            continue
        checksum = zlib.crc32(content, checksum)
    return checksum or 1


def streams_for(global_size: int, micro_size: int, num_streams: int, world_size: int) -> StreamPlan:
    """The plan for streams of their own.

    Raises:
        ValueError: they cannot be divided like this.
    """
    num = global_size // micro_size
    if num_streams < world_size:
        raise ValueError(
            f"run.batches(): num_streams {num_streams} for {world_size} ranks: some would have nothing to read. Give "
            "as many streams as elasticity.max_workers, or more. Their number stays the same as long as the job lives."
        )
    if global_size % micro_size or num % num_streams:
        raise ValueError(
            f"run.batches(): global_size {global_size} in micro-batches of {micro_size} cannot be divided by "
            f"num_streams {num_streams}: each stream gives equally many micro-batches of a step. Choose a global_size "
            f"that is a multiple of {micro_size * num_streams}."
        )
    return StreamPlan(num_streams, num, is_shared=False)
