"""Which backend a group has, and that without gloo no collective is of a tensor on the host.

torch's device "meta" stands for the GPU: its tensors have a device, and no values. So this machine needs no GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shoal_workers.contract.layout import Layout, fully_sharded
from shoal_workers.engine.deterministic.integer_sum import sums_over_ranks
from shoal_workers.engine.group.agreement import agree
from shoal_workers.engine.group.process_group import backend_of
from shoal_workers.engine.step.vote import Ballot, Requests, hold_vote

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


def agreement() -> None:
    agree("accuracy", max_bytes=64, device=GPU)


def exact_sum() -> None:
    sums_over_ranks([torch.zeros(3, device=GPU), torch.zeros(0, dtype=torch.float64, device=GPU)])


@pytest.mark.parametrize("communicate", [vote, agreement, exact_sum])
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
