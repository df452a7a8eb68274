"""What an Engine runs in its generations, as the engine sees it: it enters a generation, runs it to its end, and keeps
what the next generation can use again.

    prepare()                                   once, before the first generation
    begin(assignment)                           before the group forms: frees what this generation cannot use
    enter(membership, group) -> Entered         the group is formed; the state is as the assignment says
    run()                                       until the end of the generation
    park()                                      after every end, also of a generation that was never entered

All of it is called on the training thread, except `shape`. The engine classifies whatever is raised here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from shoal_workers.contract.messages import Assignment
from shoal_workers.contract.model import ModelShape
from shoal_workers.contract.proofs import LayoutProof
from shoal_workers.contract.worker_reports import StepReport
from shoal_workers.engine.group.process_group import Group
from shoal_workers.engine.process.exits import GenerationEnd
from shoal_workers.engine.step.generation import Membership


@dataclass(frozen=True, slots=True, kw_only=True)
class Entered:
    """What rank 0 reports once all ranks have entered a generation. Fields as those of `GroupFormed`."""

    total_steps: int | None
    """None if the program decides when it ends."""
    build_s: float
    restore_s: float
    num_parameters: int
    restored_bytes: int
    remote_bytes: int
    past: tuple[StepReport, ...] = ()
    data: str = ""
    data_before: str = ""
    proof: LayoutProof | None = None


class Program(Protocol):
    """The module docstring shows the order of the calls."""

    sums_gradients: bool
    """True if it needs `Group.gradients`."""

    shape: ModelShape | None
    """The shape of the model that was trained last; None if none was. Any thread."""

    def prepare(self, expected_bytes: int = 0) -> None:
        """Everything that needs no group. Idempotent.

        Args:
            expected_bytes: memory that training on a CPU is predicted to take.
        """

    def begin(self, assignment: Assignment) -> None: ...

    def enter(self, membership: Membership, group: Group) -> Entered: ...

    def run(self) -> GenerationEnd:
        """Returns FINISHED or YIELDED. Every other end is raised."""

    def park(self) -> None:
        """Never raises."""
