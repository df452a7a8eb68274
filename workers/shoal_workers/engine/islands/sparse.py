"""Sparse differences: of each 4,096 values the largest, as one byte with its place (as SparseLoCo, Sarfi et al. 2025).

    slices@<rank>   int64 (slices, 3 + 2 dims): number of the parameter, values kept of a chunk, dims; then the offsets
                    and the sizes of the rank's slice in the whole parameter, as many as its dims
    scales@<rank>   float32 (slices,): the largest value of each slice / 127
    places@<rank>   int16 (kept,): places in their chunks, slice by slice, chunk by chunk
    values@<rank>   int8 (kept,): in steps of the scale

3 bytes for each value that is kept, in four tensors a rank: over a slow link each tensor costs a request. Chunks are
those of the writer's slice. A reader takes the values that lie in its own slice, so any layout reads what any other
wrote. What is left out is added to the next round (error feedback).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

import torch
from torch import Tensor

from shoal_workers.checkpoint.load_plan import chunks_of
from shoal_workers.checkpoint.reader import fill, read_catalogue
from shoal_workers.checkpoint.save_plan import plan_save

_CHUNK = 4096
_KINDS = ("slices", "scales", "places", "values")
_HEAD = 3
"""Columns of `slices` before the offsets."""


def encode_sparse(
    values: Mapping[str, Tensor],
    laid_out: Mapping[str, Tensor],
    numbers: Mapping[str, int],
    density: float,
    rank: int,
    *,
    owns_replicated: bool,
) -> dict[str, Tensor]:
    """Return what this rank writes of the values of its slices.

    Args:
        values: this rank's slices, by parameter.
        laid_out: tensors that are laid out as the whole parameters are.
        numbers: of the parameters, equal on all ranks and islands.
        density: share of the values that is kept.
    """
    width = _HEAD + 2 * max((like.ndim for like in laid_out.values()), default=0)
    slices: list[list[int]] = []
    scales: list[Tensor] = []
    places: list[Tensor] = []
    kept_values: list[Tensor] = []
    for item in plan_save(laid_out, owns_replicated=owns_replicated).items:
        flat = values[item.fqn].flatten()
        num_chunks = -(-flat.numel() // _CHUNK)
        chunks = torch.nn.functional.pad(flat, (0, num_chunks * _CHUNK - flat.numel())).view(num_chunks, _CHUNK)
        num_kept = max(1, round(density * min(_CHUNK, flat.numel())))
        indices = chunks.abs().topk(num_kept, dim=1).indices
        kept = chunks.gather(1, indices)
        scale = kept.abs().max().div(127).clamp_(min=torch.finfo(torch.float32).tiny)
        row = [numbers[item.fqn], num_kept, len(item.sizes), *item.offsets, *item.sizes]
        slices.append(row + [0] * (width - len(row)))
        scales.append(scale.reshape(1))
        places.append(indices.flatten().to(torch.int16))
        kept_values.append(kept.div(scale).round_().to(torch.int8).flatten())
    if not slices:
        return {}
    tensors = (torch.tensor(slices), torch.cat(scales), torch.cat(places), torch.cat(kept_values))
    return {f"{kind}@{rank}": tensor for kind, tensor in zip(_KINDS, tensors, strict=True)}


def decode_sparse(laid_out: Mapping[str, Tensor], numbers: Mapping[str, int], directory: str) -> dict[str, Tensor]:
    """Read this rank's slices of what all ranks of an island have written, by parameter; float32, on the CPU.

    Raises: as `checkpoint.reader.fill`.
    """
    catalogue, _ = read_catalogue(directory)
    state = {name: torch.empty_like(tensor, device="cpu") for name, tensor in catalogue.items()}
    fill(state, directory=directory)
    local_slices = {numbers[name]: _LocalSlice(like) for name, like in laid_out.items()}
    for rank in sorted(name.partition("@")[2] for name in state if name.startswith("slices@")):
        slices, scales, places, values = (state[f"{kind}@{rank}"] for kind in _KINDS)
        for number, offsets, shape, indices, kept in _iterate_slices(slices, scales, places, values):
            if number in local_slices:
                local_slices[number].fill(offsets, shape, indices, kept)
    return {name: local_slices[numbers[name]].values for name in laid_out}


def _iterate_slices(
    slices: Tensor, scales: Tensor, places: Tensor, values: Tensor
) -> Iterator[tuple[int, Tensor, Tensor, Tensor, Tensor]]:
    """Yield number of the parameter, offsets, shape, places in the flat slice, and values."""
    begin = 0
    for row, scale in zip(slices, scales, strict=True):
        number, num_kept, ndim = row[:_HEAD].tolist()
        offsets, shape = row[_HEAD : _HEAD + ndim], row[_HEAD + ndim : _HEAD + 2 * ndim]
        num_chunks = -(-prod(shape.tolist()) // _CHUNK)
        end = begin + num_chunks * num_kept
        indices = places[begin:end].view(num_chunks, num_kept).long() + torch.arange(num_chunks).unsqueeze(1) * _CHUNK
        yield number, offsets, shape, indices.flatten(), values[begin:end] * scale
        begin = end


class _LocalSlice:
    """This rank's slice of a parameter, which is filled from the slices that were written."""

    def __init__(self, like: Tensor) -> None:
        """`like`: laid out as the whole parameter is."""
        chunks = chunks_of(like)
        self.values = torch.zeros(tuple(chunks[0].sizes) if chunks else (0,))
        self._first = torch.tensor(tuple(chunks[0].offsets) if chunks else (0,))

    def fill(self, offsets: Tensor, shape: Tensor, indices: Tensor, kept: Tensor) -> None:
        if not self.values.numel():
            return
        is_value = indices < int(shape.prod())  # the last chunk is padded
        if not len(shape):
            self.values.fill_(kept[is_value][0])
            return
        coordinates = torch.unravel_index(indices[is_value], tuple(shape.tolist()))
        places = torch.stack(coordinates, dim=1) + offsets - self._first
        sizes = torch.tensor(self.values.shape)
        is_local = ((places >= 0) & (places < sizes)).all(dim=1)
        self.values[tuple(places[is_local].unbind(dim=1))] = kept[is_value][is_local]
