"""The orders of an attempt that have no answer yet, by number; kept in the journal. Used by the executor only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from shoal_service.core.attempt.commands import Command, Emit, End, IssuedOrder, Order, Run, ShowIncident, SuspectNode
from shoal_service.core.attempt.state.attempt import Attempt
from shoal_service.core.attempt.unanswered import orders_of, unanswered
from shoal_service.supervisor.journal import JournalEntry

NO_ORDER = -1
"""The number of a command that is not an order."""


class UnansweredOrders:
    def __init__(self, entry: JournalEntry | None) -> None:
        """`entry`: the predecessor's, with the orders that it has issued and that are not known to be answered."""
        self.by_number: dict[int, Order] = {}
        self._written: dict[int, IssuedOrder] = {}
        """Each of them as the journal has it."""
        if entry is not None and entry.issued is not None:
            self.by_number = {issued.id: _whole(issued.order, entry.state) for issued in entry.issued}
        elif entry is not None:
            self.by_number = dict(enumerate(orders_of(entry.state)))
        self.num_issued = max(entry.num_orders if entry is not None else 0, len(self.by_number))

    def issue(self, commands: Iterable[Command]) -> list[int]:
        """Number the orders among the commands. The number of each command."""
        numbers = []
        for command in commands:
            if isinstance(command, (Emit, ShowIncident, SuspectNode, End)):
                numbers.append(NO_ORDER)
                continue
            self.by_number[self.num_issued] = command
            numbers.append(self.num_issued)
            self.num_issued += 1
        return numbers

    def drop_answered(self, state: Attempt) -> None:
        if self.by_number:
            self.by_number = unanswered(self.by_number, state)

    def done(self, number: int) -> None:
        """For orders whose answer is not in the state."""
        self.by_number.pop(number, None)

    def issued(self) -> tuple[IssuedOrder, ...]:
        """For the journal."""
        self._written = {
            number: self._written.get(number) or IssuedOrder(number, _without_source(order))
            for number, order in self.by_number.items()
        }
        return tuple(self._written.values())


def _without_source(order: Order) -> Order:
    """The source names a worker for each rank and is the same in all `run` orders of a generation. The journal has it
    once, in the state."""
    if not isinstance(order, Run) or order.assignment.restore_snapshot is None:
        return order
    return replace(order, assignment=order.assignment.model_copy(update={"restore_snapshot": None}))


def _whole(order: Order, state: Attempt) -> Order:
    """As it was issued."""
    if not isinstance(order, Run) or order.assignment.generation != state.group.generation:
        return order
    source = order.assignment.restore_snapshot or state.group.source
    return replace(order, assignment=order.assignment.model_copy(update={"restore_snapshot": source}))
