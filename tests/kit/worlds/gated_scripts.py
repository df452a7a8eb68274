"""Jobs with a script that stands still after a step until the test opens its gate, and what a test wants to know of
one."""

import re
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from kit.processes.server import PATIENCE_S, until
from shoal_api.client import Client, NotFound
from shoal_service.views import JobView
from shoal_workers.contract.job import JobState

SCRIPTS = Path(__file__).parents[1] / "scripts"


class GatedScript:
    """One job with a script of kit/scripts.

    Args:
        gated: the step after which the script waits for the file `gate`.
    """

    def __init__(
        self, client: Client, script: dict[str, Any], *, gate: Path, gated: int, min_workers: int, max_workers: int = 2
    ) -> None:
        self.client = client
        self.gate = gate
        self._gated = gated
        spec = {
            "name": "gated",
            "script": {"grace_s": 5, **script},
            "code": {"working_dir": str(SCRIPTS)},
            "elasticity": {"min_workers": min_workers, "max_workers": max_workers},
        }
        self.id = client.submit(spec).id

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Cancels the job of a test that has failed."""
        with suppress(NotFound):  # a test may delete it
            if not self.now().status.state.ended:
                self.client.cancel(self.id)

    def now(self) -> JobView:
        return self.client.job(self.id)

    def reach_the_gate(self) -> None:
        def is_there() -> bool:
            status = self.now().status
            assert not status.state.ended, status
            return status.step >= self._gated and status.state is JobState.RUNNING

        until(is_there, f"step {self._gated}")

    def open(self) -> None:
        self.gate.touch()

    def ends(self, state: JobState = JobState.SUCCEEDED) -> JobView:
        ended = self.client.wait(self.id, timeout_s=PATIENCE_S)
        assert ended.status.state is state, (ended.status, self.lines(""))
        return ended

    def lines(self, words: str) -> list[str]:
        """Lines of the job's log that have these words, a regular expression."""
        return [line.text for line in self.client.logs(self.id) if re.search(words, line.text)]

    def pid_of_worker(self, rank: int) -> int:
        return next(worker.pid for worker in self.client.workers(self.id) if worker.rank == rank)
