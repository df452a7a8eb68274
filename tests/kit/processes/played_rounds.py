"""Plays the control plane for islands: closes the rounds of a run in its storage, as the service does."""

import threading
import time
from collections import defaultdict
from collections.abc import Collection

from shoal_service.control.islands import find_rounds, read_contributions, write_decision
from shoal_service.core.islands import Contribution, close_round
from shoal_workers.contract.islands import FOLDER, IslandsSpec, RoundDecision


class PlayedRounds:
    """Looks at the open round of the run every `poll_s` seconds, on a thread of its own."""

    def __init__(self, storage: str, spec: IslandsSpec, *, poll_s: float = 0.05) -> None:
        """`storage`: URL above the directories of the jobs."""
        assert spec.run is not None
        self._decisions: dict[int, RoundDecision] = {}
        self.contributions: list[Contribution] = []
        """To all rounds that have been closed."""
        self.training: Collection[int] = set(range(spec.num))
        self._root, self.spec, self._run_id = f"{storage}/{spec.run}/{FOLDER}", spec, spec.run
        self._poll_s = poll_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def decisions(self) -> list[RoundDecision]:
        """Return those of the closed rounds, by number."""
        return [decision for _, decision in sorted(self._decisions.items())]

    def _run(self) -> None:
        arrivals: defaultdict[int, dict[Contribution, float]] = defaultdict(dict)
        while not self._stop.wait(self._poll_s):
            for number in {*find_rounds(self._root)} - self._decisions.keys():
                self._look_at(number, arrivals[number])

    def _look_at(self, number: int, arrived: dict[Contribution, float]) -> None:
        for contribution in read_contributions(self._root, number, self._run_id, now=time.time()):
            if contribution.island not in {one.island for one in arrived}:
                arrived[contribution] = time.time()
        decision = close_round(number, self.spec, arrived, self.training, time.time())
        if decision is not None:
            write_decision(self._root, decision)
            self._decisions[number] = decision
            self.contributions.extend(arrived)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
