"""The tiny task with a validation split that kills the process which reads it, with Shoal's own optimizer.

`data.validation` is {"deaths": n}: the first n samples that are read for validation kill their process by SIGSEGV, sent
to the thread that reads, which therefore reads no more. Imports nothing from Shoal.
"""

import signal
import threading

from tiny import Points, Tiny


class Deadly(Points):
    """Reading a sample kills the process, as a crash in a native library does."""

    def __init__(self, length, strike):
        super().__init__(length)
        self.strike = strike

    def __getitem__(self, index):
        self.strike()
        return super().__getitem__(index)


class Validated(Tiny):
    build_optimizer = None
    """Shoal's default, so the state lies in shared memory, twice."""

    def __init__(self, *, model, data, seed):
        super().__init__(model=model, data=data, seed=seed)
        self.deaths = data.get("validation", {}).get("deaths", 0)
        self.strikes = [strike for strike in self.strikes if strike["at"] == "prepare"]

    def build_dataset(self, split):
        return super().build_dataset(split) or Deadly(6, self._die)

    def _completed_steps(self):
        return 0

    def _die(self):
        n = 1
        while not self._claim(f"validation-{n}"):
            n += 1
        if n <= self.deaths:
            signal.pthread_kill(threading.get_ident(), signal.SIGSEGV)
