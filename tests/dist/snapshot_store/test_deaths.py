"""Snapshots outlive their process: killed between steps, killed in the middle of a copy, killed while it is read."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kit.processes.warm import warm_python
from shoal_workers.contract.snapshots import SnapshotServer, SnapshotSource
from shoal_workers.snapshot_store.slots.registry import sweep_stale
from shoal_workers.snapshot_store.snapshot_errors import SnapshotLost

_PROGRAM = Path(__file__).parents[2] / "kit" / "programs" / "snapshot_process.py"
_NUMEL = 1 << 20


class _Writer:
    def __init__(self, mode: str, root: Path) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [warm_python(), str(_PROGRAM), mode, str(root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert self.process.stdout is not None
        result = self.process.stdout.readline()
        self.source = None
        if result:
            endpoint = SnapshotServer(node_id="a", host="127.0.0.1", port=int(result))
            self.source = SnapshotSource(generation=1, world_size=1, step=1, parts=(endpoint,))

    def end(self) -> int:
        self.process.terminate()
        self.process.wait()  # before its input ends, at which it would close its store
        self.process.communicate()
        return self.process.returncode


@pytest.fixture
def start_writer(nodes: Any) -> Iterator[Callable[[str], _Writer]]:
    writers: list[_Writer] = []

    def start(mode: str) -> _Writer:
        writers.append(_Writer(mode, nodes.root))
        return writers[-1]

    yield start
    for writer in writers:
        writer.end()
    sweep_stale(nodes.root)


def _blank() -> dict[str, torch.Tensor]:
    return {"first": torch.zeros(_NUMEL), "second": torch.zeros(_NUMEL)}


def _nothing() -> None:
    pass


def test_a_process_killed_during_a_copy_leaves_the_previous_snapshot(
    nodes: Any, start_writer: Callable[[str], _Writer]
) -> None:
    writer = start_writer("torn")
    assert writer.end() == -signal.SIGKILL
    survivor, elsewhere = nodes.start("a"), nodes.start("b")
    assert _has_begun(nodes.root, 3.0)
    assert [held.step for held in survivor.snapshot_parts()] == [2]
    for store in (survivor, elsewhere):
        state = _blank()
        loaded = store.load(state, nodes.source(survivor, step=2), check=_nothing)
        assert loaded.extra == {"step": 2}
        assert all(bool((tensor == 2).all()) for tensor in state.values())
    survivor.drop_older(2)
    assert survivor.snapshot_parts() == ()


def _has_begun(root: Path, value: float) -> bool:
    """The value is in some slot, complete or not."""
    desired = torch.full((64,), value).numpy().tobytes()
    return any(desired in path.read_bytes() for path in root.glob("shoal-*/job-a1/a/*/own-*"))


def test_parts_of_a_dead_process_are_served_by_a_process_that_starts_later(
    nodes: Any, start_writer: Callable[[str], _Writer]
) -> None:
    writer = start_writer("serve")
    assert sweep_stale(nodes.root) == []
    writer.end()
    later, reader = nodes.start("a"), nodes.start("b")
    state = _blank()
    assert reader.load(state, nodes.source(later, step=1), check=_nothing).remote_bytes == 8 * _NUMEL
    assert bool((state["second"] == 1).all())


def test_parts_of_a_dead_process_are_served_by_another_node_of_its_machine(
    nodes: Any, start_writer: Callable[[str], _Writer]
) -> None:
    neighbour, reader = nodes.start("b", memory_id="a"), nodes.start("c")
    start_writer("serve").end()
    assert [(held.step, held.node_id) for held in neighbour.snapshot_parts()] == [(1, "b")]
    state = _blank()
    assert neighbour.load(state, nodes.source(neighbour, step=1), check=_nothing).local_bytes == 8 * _NUMEL
    assert reader.load(state, nodes.source(neighbour, step=1), check=_nothing).remote_bytes == 8 * _NUMEL


def test_a_peer_killed_during_a_read_is_detected_without_a_timeout(
    nodes: Any, start_writer: Callable[[str], _Writer]
) -> None:
    writer = start_writer("serve")
    reader = nodes.start("b")
    assert writer.source is not None
    num_checks = 0

    def check() -> None:
        nonlocal num_checks
        num_checks += 1
        if num_checks == 8:  # connected, and in the middle of its message
            writer.end()

    for why in ("closed the connection|reset by peer", "Connection refused"):
        with pytest.raises(SnapshotLost, match=why) as caught:
            reader.load(_blank(), writer.source, check=check)
        assert caught.value.node_id == "a"
