"""Processes of an attempt that run until they are killed."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

_PROGRAM = Path(__file__).parents[3] / "kit" / "programs" / "attempt_process.py"


class AttemptProcess:
    """A real process: the kernel decides when its locks are released and what files remain."""

    def __init__(self, root: Path, job: str, node: str, parts: tuple[str, ...]) -> None:
        command = [sys.executable, str(_PROGRAM), str(root), job, node, *parts]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.path = Path(self._process.stdout.readline().strip())

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def start_process(tmp_path: Path) -> Iterator[Callable[..., AttemptProcess]]:
    """`start_process("1:10", "1:11", job=, node=)`: it has these parts, as generation:step."""
    processes: list[AttemptProcess] = []

    def start(*parts: str, job: str = "job", node: str = "n") -> AttemptProcess:
        processes.append(AttemptProcess(tmp_path, job, node, parts))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
