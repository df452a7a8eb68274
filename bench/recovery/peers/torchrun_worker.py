"""The worker program of the torchrun peer: the peer loop with checkpoints in a local directory.

torchrun --standalone --nproc-per-node 4 --max-restarts 1000 bench/recovery/peers/torchrun_worker.py FOLDER
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch.distributed as dist

# Started as a script from any directory: the shared modules are found beside this folder.
sys.path.extend(str(Path(__file__).parents[3] / name) for name in ("bench", "tools"))

from plain_loop import PlainLoop
from recovery.peers.loop import save_state, train


class LocalCheckpoints:
    """One directory per step. The file `latest` is replaced when the directory is complete. The newest two are kept."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._saved: list[Path] = []

    def newest(self) -> tuple[Path, int] | None:
        latest = self._root / "latest"
        if not latest.exists():
            return None
        step = int(latest.read_text())
        return self._directory(step), step

    def save(self, loop: PlainLoop, step: int) -> None:
        directory = self._directory(step)
        save_state(loop, directory)  # returns on rank 0 once every rank's part and the metadata are written
        if dist.get_rank() == 0:
            (self._root / "latest.tmp").write_text(str(step))
            (self._root / "latest.tmp").replace(self._root / "latest")
            self._saved.append(directory)
            for old in self._saved[:-2]:
                shutil.rmtree(old, ignore_errors=True)

    def _directory(self, step: int) -> Path:
        return self._root / f"step-{step:06}"


def main() -> None:
    dist.init_process_group("gloo")
    folder = Path(sys.argv[1])
    train(folder, LocalCheckpoints(folder / "checkpoints"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
