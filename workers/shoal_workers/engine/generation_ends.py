"""Exceptions that end a generation. They unwind the training thread, and never leave `Engine.run`.

BaseException
├── Fenced                  the supervisor fenced this generation
├── GroupBroken             a collective has failed, and the user's code has caught the error
├── EngineError (an Exception)
│   ├── TaskFailed          the user's own code raised; carries the ErrorReport
│   ├── FormFailed          the group did not form
│   ├── NonFinite           loss or gradient norm is not finite
│   ├── ComputesWrong       a replay named a rank, and the supervisor did not remove it in time
│   ├── LayoutRefused       a proof has shown that the layout trains another model
│   ├── DataDiffers         ranks read different data, or the data is not that of the job's checkpoint
│   └── StorageFailed       storage could not be read or written, and training cannot continue without it
└── (torch) RuntimeError, DistError: a broken collective, recognised by `group/collectives.py`
"""

from __future__ import annotations

from shoal_workers.contract.exception_causes import LAYOUT_REFUSED
from shoal_workers.contract.messages import ErrorReport, Phase
from shoal_workers.contract.proofs import LayoutProof
from shoal_workers.contract.suspects import Suspect


class EngineError(Exception):
    """Root of the tree above."""


class TaskFailed(EngineError):
    """Code of the task raised; the user reads `report`."""

    def __init__(self, report: ErrorReport) -> None:
        super().__init__(report)
        self.report = report

    def __str__(self) -> str:
        return f"{self.report.type} while {self.report.phase}: {self.report.message}"


class FormFailed(EngineError):
    """Ranks did not arrive in time, or the rendezvous store was unreachable."""


class Fenced(BaseException):
    """The supervisor has ended the generation; the training thread leaves it as fast as it can.

    Not an Exception, so that an `except Exception` of the user's code does not keep the thread in a broken group.
    """


class GroupBroken(BaseException):
    """A collective has failed, and the user's code has caught the error.

    The next call into Shoal raises it.
    """


class NonFinite(EngineError):
    """Raised on every rank in the same step, before anything is changed."""

    def __init__(self, message: str, suspect: Suspect | None) -> None:
        super().__init__(message)
        self.suspect = suspect


class ComputesWrong(EngineError):
    """Raised by all ranks before a step whose replay named one."""


class DataDiffers(EngineError):
    """Raised by every rank before the first step; the message is for the user."""


class LayoutRefused(EngineError):
    """Raised before the first step of a layout; `proof` has the reason.

    At least one rank raises it.
    """

    def __init__(self, proof: LayoutProof) -> None:
        super().__init__(proof)
        self.proof = proof

    def __str__(self) -> str:
        return self.proof.words

    def report(self, phase: Phase) -> ErrorReport:
        """Make the report that the user reads."""
        return ErrorReport(type="LayoutRefused", message=str(self), traceback="", phase=phase, mistake=LAYOUT_REFUSED)


class StorageFailed(EngineError):
    """The checkpoint storage failed, and continuing would lose the run."""
