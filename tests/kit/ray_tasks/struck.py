"""The tiny task, held at any phase of the engine, so that the fault matrix can cause a fault at that phase.

A hold is {"phase": ..., "n": ..., "rank": ...}, and `data.holds` has any number of them:

    phase    a name of the engine's phases: preparing, forming, building, restoring, forward, optimizer, saving ...
    n        for phases of a step: of step n (1, 2, ...); preparing: of the n-th process of the job; other phases: for
             the n-th time in this process
    rank     the rank that is held; not for preparing and forming, before ranks exist: there n counts processes

A held process creates the file NAME.reached with its pid and waits for NAME.go; NAME is PHASE-N-RANK or PHASE-N.
Each hold applies to one process once, also if the step is repeated.

Unlike a user's task, this one uses the engine: it sets the hook of this process's `Position`, which is called at
each phase entry. The engine provides that hook for tests; no part of it is patched.
"""

import gc
import os
import time

import torch.distributed as dist
from tiny import Tiny

from shoal_workers.contract.messages import Phase
from shoal_workers.engine.process.position import Position

_AFTER_THE_STEP = (Phase.SNAPSHOT, Phase.SAVING, Phase.COMMITTING, Phase.VALIDATING)
_OF_A_STEP = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, *_AFTER_THE_STEP)


class Struck(Tiny):
    def __init__(self, *, model, data, seed):
        super().__init__(model=model, data=data, seed=seed)
        self.holds = data.get("holds", [])
        self.times = {}

    def arrive(self):
        [position] = [found for found in gc.get_objects() if type(found) is Position]
        position._on_phase = self._at_phase
        n = 1
        while not self._claim(f"process-{n}"):
            n += 1
        (self.gate / f"process-{n}.pid").write_text(str(os.getpid()))
        self._hold("preparing", n, None)
        super().arrive()

    def _at_phase(self, phase, completed_steps):
        self.times[phase] = self.times.get(phase, 0) + 1
        step = completed_steps if phase in _AFTER_THE_STEP else completed_steps + 1
        n = step if phase in _OF_A_STEP else self.times[phase]
        self._hold(str(phase), n, dist.get_rank() if dist.is_initialized() else None)

    def _hold(self, phase, n, rank):
        for hold in self.holds:
            if (hold["phase"], hold["n"]) != (phase, n) or hold.get("rank") not in (rank, None):
                continue
            name = "-".join(str(part) for part in (phase, n, hold.get("rank")) if part is not None)
            if self._claim(f"{name}.claimed"):
                unfinished = self.gate / f"{name}.pid"
                unfinished.write_text(str(os.getpid()))
                unfinished.rename(self.gate / f"{name}.reached")
                while not (self.gate / f"{name}.go").exists():
                    time.sleep(0.01)


class BuiltIn(Struck):
    """With the engine's own optimizer, so that its state is in shared memory, and gradients are logged."""

    build_optimizer = None

    def __init__(self, *, model, data, seed):
        super().__init__(model=model, data=data, seed=seed)
        self.completed_steps = 0

    def _at_phase(self, phase, completed_steps):
        self.completed_steps = completed_steps
        super()._at_phase(phase, completed_steps)

    def _completed_steps(self):
        return self.completed_steps
