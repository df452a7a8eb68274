"""An island's difference as tensors of a directory in the storage, in the format of a checkpoint: so any layout reads
what any other wrote, with lengths and checksums.

    difference.<parameter>   outer - sent + residual, in the type of `islands.compress`; with pairs sent, the weights
    scales                   of int8: a number for each trained parameter of the model, the largest value / 127

`sparse` has the tensors of sparse.py.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from itertools import zip_longest
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shoal_workers.checkpoint.reader import fill
from shoal_workers.checkpoint.save_plan import local_tensor
from shoal_workers.contract.islands import IslandsSpec, Member, RoundDecision
from shoal_workers.contract.optimizers import OUTER, RESIDUAL, SENT
from shoal_workers.engine.group.all_ranks import all_ranks
from shoal_workers.engine.islands.sparse import decode_sparse, encode_sparse
from shoal_workers.engine.parallel.cutting import local, shard_like
from shoal_workers.engine.parallel.device_copies import to_device
from shoal_workers.engine.step.generation import Generation
from shoal_workers.engine.step.update import Update

M = TypeVar("M")
R = TypeVar("R")

_READS_AT_ONCE = 8
"""Members whose values are in host memory at once, as they were written. The device has those of one."""
_TYPES = {"none": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}


@dataclass(frozen=True, slots=True)
class Part:
    """This rank's part of a parameter that merges."""

    name: str
    parameter: Tensor
    """The optimizer's."""
    like: Tensor
    """The outer weights, laid out as the whole parameter is."""
    state: Mapping[str, Tensor]
    """What the optimizer keeps of it."""

    def value(self, topology: str) -> Tensor:
        """Return what the other islands get of it."""
        if topology == "pairs":
            return local(self.state[SENT])
        value = local(self.state[OUTER]) - local(self.state[SENT])
        return value.add_(local(self.state[RESIDUAL])) if RESIDUAL in self.state else value

    def lay_out(self, values: Tensor) -> Tensor:
        return shard_like(self.like, values) if isinstance(self.like, DTensor) else values


def parts_of(update: Update, trained: Sequence[str], fragment: int, num_fragments: int) -> list[Part]:
    """Return the parameters of a fragment whose state has begun, in the order of the optimizer.

    Args:
        trained: names of the whole model's trained parameters, equal on all ranks: every `num_fragments`-th of them is
            one of the fragment.
    """
    merged = {*trained[fragment::num_fragments]}
    laid_out = {name: value for name, key, value in update.state() if key == OUTER and isinstance(value, Tensor)}
    return [
        Part(name, parameter, laid_out[name], update.optimizer.state[parameter])
        for _, name, parameter, _ in update.named_parameters()
        if name in laid_out and name in merged
    ]


@torch.no_grad()
def encode(
    parts: Sequence[Part], spec: IslandsSpec, generation: Generation, trained: Sequence[str]
) -> dict[str, Tensor]:
    """Return what is written. With int8 a collective of all ranks. `trained`: as for `parts_of`."""
    values = {part.name: part.value(spec.topology) for part in parts}
    if spec.compress == "sparse":
        owns = generation.layout.owns_replicated(generation.rank)
        laid_out = {part.name: part.like for part in parts}
        numbers = _numbers(trained)
        return encode_sparse(values, laid_out, numbers, spec.density, generation.rank, owns_replicated=owns)
    if spec.compress != "int8":
        return {f"difference.{part.name}": part.lay_out(values[part.name].to(_TYPES[spec.compress])) for part in parts}
    scales, numbers = _scales(values, trained, generation.device), _numbers(trained)
    written = {"scales": scales}
    for name, part in ((part.name, part) for part in parts):
        steps = values[name].div(scales[numbers[name]]).round_()
        written[f"difference.{name}"] = part.lay_out(steps.to(torch.int8))
    return written


@torch.no_grad()
def read_member(parts: Sequence[Part], kind: str, directory: str, trained: Sequence[str]) -> dict[str, Tensor]:
    """Read what an island has written into host memory: this rank's parts, by name in the storage. No collective.
    `trained`: as for `parts_of`.

    Raises: as `checkpoint.reader.fill`.
    """
    if kind == "sparse":
        values = decode_sparse({part.name: part.like for part in parts}, _numbers(trained), directory)
        return {f"difference.{name}": value for name, value in values.items()}
    state: dict[str, Tensor] = {}
    for part in parts:
        host = torch.empty_like(local(part.like), dtype=_TYPES[kind], device="cpu")
        state[f"difference.{part.name}"] = part.lay_out(host)
    if kind == "int8" and parts:
        state["scales"] = torch.empty(len(trained))
    fill(state, directory=directory)
    return {name: local_tensor(value) for name, value in state.items()}


@torch.no_grad()
def decode(
    parts: Sequence[Part], kind: str, read: Mapping[str, Tensor], trained: Sequence[str]
) -> dict[Tensor, Tensor]:
    """Return what was read as values on the device, by parameter of the optimizer. `trained`: as for `parts_of`."""
    numbers, values = _numbers(trained), {}
    for part in parts:
        value = to_device(read[f"difference.{part.name}"], local(part.like).device).float()
        values[part.parameter] = value.mul_(read["scales"][numbers[part.name]].item()) if kind == "int8" else value
    return values


def read_round(
    parts: Sequence[Part], spec: IslandsSpec, decision: RoundDecision, folder: str, trained: Sequence[str]
) -> tuple[dict[Tensor, Tensor], dict[Tensor, Tensor] | None]:
    """Return the weighted mean of what the members have written, and this island's own if it is a member. `trained`: as
    for `parts_of`."""
    means: dict[Tensor, Tensor] = {}
    own = None

    def read(member: Member) -> dict[str, Tensor]:
        return read_member(parts, spec.compress, f"{folder}/{member.directory}", trained)

    for member, written in read_ahead(read, decision.members):
        values = decode(parts, spec.compress, written, trained)
        if member.island == spec.index:
            own = {parameter: value.clone() for parameter, value in values.items()}
        for parameter, value in values.items():
            value.mul_(member.weight)
            means[parameter] = means[parameter].add_(value) if parameter in means else value
    return means, own


def read_ahead(read: Callable[[M], R], members: Sequence[M]) -> Iterator[tuple[M, R]]:
    """Yield what each member has written, in order. Some are read at once: a request to an object store may take 100 ms
    until its first byte, and a member takes several. The threads do not hold up the end of the process."""
    reads: deque[Future[R]] = deque()

    def begin(member: M) -> None:
        reading: Future[R] = Future()
        reads.append(reading)

        def run() -> None:
            try:
                reading.set_result(read(member))
            except BaseException as error:  # the reader of the round raises it
                reading.set_exception(error)

        threading.Thread(target=run, name="shoal-islands-read", daemon=True).start()

    for member in members[:_READS_AT_ONCE]:
        begin(member)
    try:
        for member, following in zip_longest(members, members[_READS_AT_ONCE:]):
            yield member, reads.popleft().result()
            if following is not None:
                begin(following)
    finally:
        wait(reads)


def _scales(values: Mapping[str, Tensor], trained: Sequence[str], device: torch.device) -> Tensor:
    """Return a scale for each trained parameter: of its largest value on any rank, and never 0."""
    largest, numbers = torch.zeros(len(trained), device=device), _numbers(trained)
    for name, value in values.items():
        if value.numel():
            largest[numbers[name]] = value.abs().max()
    all_ranks().all_reduce(largest, dist.ReduceOp.MAX)
    return largest.div_(127).clamp_(min=torch.finfo(torch.float32).tiny)


def _numbers(trained: Sequence[str]) -> dict[str, int]:
    return {name: number for number, name in enumerate(trained)}
