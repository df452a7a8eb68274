"""Which backend a group has, and that without gloo no collective is of a tensor on the host.

torch's device "meta" stands for the GPU: its tensors have a device, and no values. So this machine needs no GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shoal_workers.contract.layout import Layout, fully_sharded
from shoal_workers.engine.deterministic.integer_sum import sums_over_ranks
from shoal_workers.engine.group.process_group import backend_of
from shoal_workers.engine.step.vote import Ballot, Requests, hold_vote
from shoal_workers.torch_internals import abort_nccl

GPU = torch.device("meta")


class Communicated(Exception):
    """In place of a result."""


@pytest.mark.parametrize(
    ("device", "layout", "backend"),
    [
        ("cpu", fully_sharded(4), "gloo"),
        ("cpu", Layout(dp_shard=4, offload=True), "gloo"),
        ("cuda", fully_sharded(4), "nccl"),
        ("cuda", Layout(dp_shard=2, tp=2), "nccl"),
        ("cuda", Layout(dp_shard=4, offload=True), "cpu:gloo,cuda:nccl"),
    ],
)
def test_gpus_have_gloo_only_for_what_is_offloaded(device: str, layout: Layout, backend: str) -> None:
    assert backend_of(device, layout) == backend
    devices = dist.BackendConfig(dist.Backend(backend)).get_device_backend_map()  # type: ignore[no-untyped-call]
    assert ("cpu" in devices) == ("gloo" in backend), "torch reads it so"


def vote() -> None:
    ballot = Ballot(
        loss_sum=torch.zeros((), device=GPU),
        squared_norm=torch.zeros((), dtype=torch.float64, device=GPU),
        requests=Requests(),
        compute_s=1.0,
        copy_s=0.0,
        send_s=0.0,
        metrics=torch.zeros(2, dtype=torch.float64, device=GPU),
    )
    hold_vote(ballot, rank=1, world_size=4)


def exact_sum() -> None:
    sums_over_ranks([torch.zeros(3, device=GPU), torch.zeros(0, dtype=torch.float64, device=GPU)])


@pytest.mark.parametrize("communicate", [vote, exact_sum])
def test_what_all_ranks_exchange_is_on_their_gpus(
    monkeypatch: pytest.MonkeyPatch, communicate: Callable[[], None]
) -> None:
    devices = []

    def all_reduce(tensor: torch.Tensor, **_: Any) -> None:
        devices.append(tensor.device)
        raise Communicated

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    with pytest.raises(Communicated):
        communicate()
    assert devices == [GPU]


class Communicator:
    """Stands for one of several on a GPU. As in NCCL, an abort ends its own kernels and waits for all others."""

    def __init__(self, has_ended: threading.Barrier) -> None:
        self._has_ended = has_ended

    def _get_backend(self, device: torch.device) -> Communicator:
        assert device == torch.device("cuda")
        return self

    def abort(self) -> None:
        self._has_ended.wait(60)


def test_communicators_are_aborted_at_once_since_each_waits_for_the_kernels_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    have_ended = threading.Barrier(3)
    groups = {Communicator(have_ended): ("nccl", None) for _ in range(3)}
    monkeypatch.setattr(dist.distributed_c10d, "_pg_map", groups)
    abort_nccl()
    assert not have_ended.broken and have_ended.n_waiting == 0
