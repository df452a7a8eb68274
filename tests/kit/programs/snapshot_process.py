"""Program of a process on node `a` that takes snapshots: `python snapshot_process.py torn|serve ROOT`.

torn     takes steps 1 and 2, then is killed during the copy of step 3: between its first and its second tensor
serve    takes step 1, prints its port and runs until its stdin ends
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from shoal_workers.snapshot_store.store import SnapshotStore

_NUMEL = 1 << 20


class Fatal(torch.Tensor):
    """A tensor that kills the process which copies it, after the tensors before it have been copied."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.data_ptr:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__torch_function__(func, types, args, kwargs or {})


def snapshot(store: SnapshotStore, step: int, second: torch.Tensor | None = None) -> None:
    first = torch.full((_NUMEL,), float(step))
    state = {"first": first, "second": first.clone() if second is None else second}
    store.snapshot(state, generation=1, rank=0, world_size=1, step=step, extra={"step": step})


def main(mode: str, root: str) -> None:
    torch.set_num_threads(1)
    store = SnapshotStore(job_id="job", attempt=1, worker_id="writer", node_id="a", key="secret", root=Path(root))
    snapshot(store, 1)
    if mode == "torn":
        snapshot(store, 2)
        snapshot(store, 3, torch.full((_NUMEL,), 3.0).as_subclass(Fatal))
    print(store.port, flush=True)
    sys.stdin.read()
    store.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
