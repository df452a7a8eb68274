"""One call to an agent brings the answers of several workers; its positions are those of the supervisor."""

import asyncio
from collections.abc import Awaitable

import pytest

from doubles.event_loop import settle
from shoal_workers.contract.messages import (
    LogLine,
    LogStream,
    NodePoll,
    Phase,
    PollRequest,
    Progress,
    Refused,
    WorkerPoll,
)
from shoal_workers.poll_agent.agent import NodePolls, until_common_end

_LINE = LogLine(at=1.0, stream=LogStream.STDOUT, text="a line")


def request(name: str, after: int = 0, *, wait_s: float = 20.0) -> PollRequest:
    return PollRequest(worker_id=name, after=after, acknowledged=0, wait_s=wait_s)


def idle(name: str, seq: int = 0) -> WorkerPoll:
    progress = Progress(generation=1, phase=Phase.FORWARD, step=1, at=1.0)
    return WorkerPoll(worker_id=name, seq=seq, reports=(), logs=(), progress=progress)


def printed(name: str, seq: int) -> WorkerPoll:
    return idle(name, seq).model_copy(update={"logs": (_LINE,)})


class Workers:
    """Their polls, which a test answers."""

    def __init__(self, **settings: float) -> None:
        self.polled: list[tuple[str, int, int]] = []
        """Name, position and life of each poll."""
        self.calls: dict[str, asyncio.Future[WorkerPoll | Refused]] = {}
        self.agent = NodePolls(self._poll, **settings)

    def _poll(self, wanted: PollRequest, life: int) -> Awaitable[WorkerPoll | Refused]:
        self.polled.append((wanted.worker_id, wanted.after, life))
        self.calls[wanted.worker_id] = asyncio.get_running_loop().create_future()
        return self.calls[wanted.worker_id]

    async def call(self, *requests: PollRequest, life: int = 1) -> asyncio.Task[NodePoll | Refused]:
        """In flight when this returns."""
        call = asyncio.ensure_future(self.agent.poll(requests, life))
        await settle()
        return call


@pytest.fixture
def workers() -> Workers:
    return Workers()


async def test_the_first_answer_with_something_new_ends_the_call_and_the_other_poll_stays_in_flight(
    workers: Workers,
) -> None:
    call = await workers.call(request("a"), request("b"))
    workers.calls["a"].set_result(printed("a", 1))
    assert await call == NodePoll(polls=(printed("a", 1),))
    second = await workers.call(request("a", 1), request("b"))
    assert workers.polled == [("a", 0, 1), ("b", 0, 1), ("a", 1, 1)], "b is not polled again"
    workers.calls["b"].set_result(printed("b", 4))
    assert await second == NodePoll(polls=(printed("b", 4),))


async def test_answers_without_anything_new_are_sent_together() -> None:
    workers = Workers(gather_s=60.0)
    call = await workers.call(request("a"), request("b"))
    workers.calls["a"].set_result(idle("a"))
    await settle()
    assert not call.done(), "others are about to answer"
    workers.calls["b"].set_result(idle("b"))
    assert await call == NodePoll(polls=(idle("a"), idle("b")))


async def test_answers_without_anything_new_do_not_wait_for_the_last_worker(workers: Workers) -> None:
    call = await workers.call(request("a", wait_s=600.0), request("b", wait_s=600.0))
    workers.calls["a"].set_result(idle("a"))
    assert await call == NodePoll(polls=(idle("a"),))


async def test_something_new_does_not_wait_for_others() -> None:
    workers = Workers(gather_s=600.0)
    call = await workers.call(request("a"), request("b"))
    workers.calls["a"].set_result(idle("a"))
    await settle()
    workers.calls["b"].set_result(printed("b", 2))
    assert await call == NodePoll(polls=(idle("a"), printed("b", 2)))


async def test_silent_workers_are_not_waited_for_longer_than_their_polls_may_take(workers: Workers) -> None:
    call = await workers.call(request("a", wait_s=0.0))
    assert await call == NodePoll()
    assert not workers.calls["a"].done(), "its poll is still in flight"


async def test_a_failed_poll_names_the_worker(workers: Workers) -> None:
    call = await workers.call(request("a"), request("b"))
    workers.calls["a"].set_exception(OSError("it has ended"))
    assert await call == NodePoll(failed=("a",))


async def test_a_position_that_has_changed_is_polled_again(workers: Workers) -> None:
    call = await workers.call(request("a"), request("b"))
    workers.calls["b"].set_result(printed("b", 1))
    await call
    old = workers.calls["a"]
    second = await workers.call(request("a", 7), request("b", 1))  # a was polled directly meanwhile
    assert old.cancelled() and workers.polled[-2:] == [("a", 7, 1), ("b", 1, 1)]
    workers.calls["a"].set_result(printed("a", 8))
    assert await second == NodePoll(polls=(printed("a", 8),))


async def test_a_call_that_was_overtaken_takes_no_answer_from_the_later_one(workers: Workers) -> None:
    first = await workers.call(request("a"))
    second = await workers.call(request("a"))
    workers.calls["a"].set_result(printed("a", 1))
    assert await second == NodePoll(polls=(printed("a", 1),))
    assert await first == NodePoll()


async def test_a_worker_that_is_not_requested_any_more_is_not_polled(workers: Workers) -> None:
    call = await workers.call(request("a"), request("b"))
    workers.calls["b"].set_result(printed("b", 1))
    await call
    await workers.call(request("b", 1))
    assert workers.calls["a"].cancelled()


async def test_the_newest_supervisor_is_obeyed_and_an_older_one_is_refused(workers: Workers) -> None:
    older = await workers.call(request("a"), life=1)
    newer = await workers.call(request("a"), life=2)
    assert workers.polled == [("a", 0, 1), ("a", 0, 2)], "the worker learns of the newer one"
    assert await workers.agent.poll([request("a")], 1) == Refused(life=2)
    workers.calls["a"].set_result(printed("a", 1))
    assert await newer == NodePoll(polls=(printed("a", 1),))
    assert await older == NodePoll()


async def test_a_refusal_by_a_worker_reaches_the_supervisor(workers: Workers) -> None:
    call = await workers.call(request("a"), request("b"))
    workers.calls["b"].set_result(Refused(life=3))
    assert await call == Refused(life=3)


@pytest.mark.parametrize("wait_s", [0.25, 1.0, 8.0])
def test_polls_that_begin_at_different_times_end_together(wait_s: float) -> None:
    begins = [1000.0 + wait_s * part / 20 for part in range(20)]
    waits = [until_common_end(begin, wait_s) for begin in begins]
    assert all(wait_s / 2 < wait <= wait_s for wait in waits)
    ends = {round(begin + wait, 6) for begin, wait in zip(begins, waits, strict=True)}
    assert len(ends) == 2, ends
    later = [until_common_end(end + 0.003, wait_s) for end in ends]
    assert later == pytest.approx([wait_s - 0.003] * 2), "and so do those that follow"


def test_a_poll_that_does_not_wait_is_not_delayed() -> None:
    assert until_common_end(12.3, 0.0) == 0.0
