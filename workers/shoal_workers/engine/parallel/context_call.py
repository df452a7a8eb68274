"""A call of the model under cp: loss() has the whole batch, and the model computes one rank's tokens of it.

    arguments   tensors with the sequence's length along a dim of plan.sequence are cut there; the others stay
    output      with a dim of the rank's tokens    the whole tensor: a SplitOutput, or gathered if it cannot be one
                floating-point, without one        the mean over the ranks, as of a mean over the sequence
                any other                          as it is

So loss() computes what one process computes, whatever it does with labels, masks and metrics, and every rank has the
same loss. A model that itself mixes tokens outside its attention modules is another matter: the proof of the layout
finds it. Made by `assemble`, which installs it around a model that is not split into stages; `PipelinePasses` applies
it to the calls that it has caught.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves, tree_map

from shoal_workers.engine.parallel.exchange import gather_same, total
from shoal_workers.engine.parallel.head_tail import in_order, own_part
from shoal_workers.engine.parallel.split_output import Split, SplitOutput, split_output

_TOKENS = 1
"""The dim that a SplitOutput can be split along."""


class ContextCall:
    """One rank's view of the calls of one model, one call at a time: `arguments`, the forward pass, then `output`."""

    def __init__(self, sequence: Mapping[str, int], mesh: DeviceMesh) -> None:
        self._dims = tuple(dict.fromkeys(sequence.values()))
        self._names = ", ".join(f"{name!r}: {dim}" for name, dim in sequence.items()) or "nothing"
        self._mesh = mesh
        self._degree = mesh.size()
        self._length = 0
        """Tokens of the whole sequence in the call that runs."""

    def install(self, model: nn.Module) -> None:
        """Around its forward. Hooks of the task see whole arguments before, and the whole output after it."""
        model.register_forward_pre_hook(lambda _, args, kwargs: self.arguments(args, kwargs), with_kwargs=True)
        model.register_forward_hook(lambda _module, _args, output: self.output(output), prepend=True)

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Those of this rank.

        Raises:
            ValueError: no tensor has a dim of plan.sequence, or the degree does not divide its length.
        """
        tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        lengths = (tensor.shape[dim] for tensor in tensors for dim in self._dims if -tensor.ndim <= dim < tensor.ndim)
        length = self._length = next(lengths, 0)
        if not length:
            raise ValueError(
                f"loss() calls the model with no tensor that has a dim of plan.sequence ({self._names}), along which "
                f"cp {self._degree} cuts it. Correct plan.sequence, or set parallelism.cp to 1."
            )
        num_chunks = 2 * self._degree
        if length % num_chunks:
            raise ValueError(
                f"loss() calls the model with {length} tokens (plan.sequence: {self._names}), which cp {self._degree} "
                f"cannot split into 2 x {self._degree} equal chunks: {length} = {length // num_chunks} x {num_chunks} "
                f"+ {length % num_chunks}. Use a multiple of {num_chunks}."
            )
        own_args, own_kwargs = tree_map(self._cut, (args, kwargs))
        return own_args, own_kwargs

    def cut(self, argument: Tensor) -> Tensor:
        """This rank's part of one of the arguments."""
        cut: Tensor = self._cut(argument)
        return cut

    def output(self, output: Any) -> Any:
        """What one process would return."""
        if dataclasses.is_dataclass(output) and not isinstance(output, type | Mapping):
            fields = {field.name: self.output(getattr(output, field.name)) for field in dataclasses.fields(output)}
            return dataclasses.replace(output, **fields)
        return tree_map(self._joined, output)

    def _cut(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        for dim in self._dims:
            if -value.ndim <= dim < value.ndim and value.shape[dim] == self._length:
                return own_part(value, self._mesh.get_local_rank(), self._degree, dim)
        return value

    def _joined(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        own_length = self._length // self._degree
        if value.ndim > _TOKENS and value.shape[_TOKENS] == own_length and value.is_floating_point():
            return split_output(value, Split(cp=self._mesh))
        if isinstance(value, SplitOutput):
            value = value.whole()
        for dim in (_TOKENS, *self._dims):
            if -value.ndim <= dim < value.ndim and value.shape[dim] == own_length:
                parts = gather_same(value.unsqueeze(0), 0, self._mesh)
                return in_order(parts, dim if dim < 0 else dim - value.ndim)
        return total(value, self._mesh) / self._degree if value.is_floating_point() else value
