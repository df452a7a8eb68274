from __future__ import annotations

import pytest

from shoal_workers.engine.group.store.key_values import KeyValues
from shoal_workers.engine.group.store.messages import Operation, Outcome, Space, StoreAnswer, StoreRequest, split

SPACE = Space(3, "job/1")


def ask(
    store: KeyValues[str],
    operation: Operation,
    *operands: bytes,
    client: str = "a",
    space: Space = SPACE,
    number: int = 1,
) -> StoreAnswer | None:
    return store.apply(client, StoreRequest(number, operation, space, operands))


def values(store: KeyValues[str], operation: Operation, *operands: bytes) -> tuple[bytes, ...]:
    answer = ask(store, operation, *operands)
    assert answer is not None and answer.outcome is Outcome.DONE
    return answer.values


def test_a_value_is_read_as_it_was_written() -> None:
    store = KeyValues[str]()
    assert values(store, Operation.SET, b"k", b"v", b"l", b"\0w") == ()
    assert values(store, Operation.GET, b"l", b"k") == (b"\0w", b"v")
    assert values(store, Operation.CHECK, b"k", b"x") == (b"0",)
    assert values(store, Operation.KEYS) == (b"k", b"l")
    assert values(store, Operation.DELETE, b"k") == (b"1",)
    assert values(store, Operation.DELETE, b"k") == (b"0",)


def test_numbers_are_added_and_values_appended() -> None:
    store = KeyValues[str]()
    assert [values(store, Operation.ADD, b"n", number)[0] for number in (b"2", b"-5")] == [b"2", b"-3"]
    values(store, Operation.APPEND, b"t", b"ab")
    values(store, Operation.APPEND, b"t", b"c")
    assert values(store, Operation.GET, b"t") == (b"abc",)


def test_compare_and_set_answers_what_is_there_afterwards() -> None:
    store = KeyValues[str]()
    assert values(store, Operation.COMPARE_SET, b"k", b"other", b"new") == (b"other",), "a missing key is not set"
    assert values(store, Operation.COMPARE_SET, b"k", b"", b"one") == (b"one",)
    assert values(store, Operation.COMPARE_SET, b"k", b"zero", b"two") == (b"one",)
    assert values(store, Operation.COMPARE_SET, b"k", b"one", b"two") == (b"two",)


def test_a_client_that_sends_another_request_has_given_up_its_wait() -> None:
    store = KeyValues[str]()
    assert ask(store, Operation.GET, b"x", client="b") is None
    ask(store, Operation.SET, b"y", b"1", client="b", number=2)
    ask(store, Operation.SET, b"x", b"1")
    assert store.ready() == []


def test_a_client_that_is_gone_gets_no_answer() -> None:
    store = KeyValues[str]()
    assert ask(store, Operation.GET, b"x", client="b") is None
    store.forget("b")
    ask(store, Operation.SET, b"x", b"1")
    assert store.ready() == []


def test_a_newer_generation_removes_the_keys_of_older_ones_and_refuses_their_requests() -> None:
    store = KeyValues[str]()
    for key in (b"a", b"b"):
        ask(store, Operation.SET, key, b"1")
    assert ask(store, Operation.WAIT, b"never", client="late") is None
    ask(store, Operation.SET, b"a", b"new", space=Space(4, "job/1"))
    assert store.num_keys == 1
    assert store.ready() == [("late", StoreAnswer(1, Outcome.STALE, (b"4",)))]
    assert ask(store, Operation.SET, b"a", b"old") == StoreAnswer(1, Outcome.STALE, (b"4",))


def test_spaces_of_one_generation_are_apart() -> None:
    store = KeyValues[str]()
    ask(store, Operation.SET, b"a", b"1")
    assert ask(store, Operation.CHECK, b"a", space=Space(3, "another")) == StoreAnswer(1, Outcome.DONE, (b"0",))


def test_a_wait_looks_again_at_keys_that_were_deleted_meanwhile() -> None:
    store = KeyValues[str]()
    ask(store, Operation.SET, b"x", b"1")
    assert ask(store, Operation.GET, b"x", b"y", client="b") is None
    ask(store, Operation.DELETE, b"x")
    ask(store, Operation.SET, b"y", b"2")
    assert store.ready() == []
    ask(store, Operation.SET, b"x", b"3")
    assert store.ready() == [("b", StoreAnswer(1, Outcome.DONE, (b"3", b"2")))]


def test_a_wait_for_many_keys_ends_in_whatever_order_they_come() -> None:
    store = KeyValues[str]()
    keys = [str(number).encode() for number in range(50)]
    for client in ("b", "c"):
        assert ask(store, Operation.WAIT, *keys, client=client) is None
    for key in (*keys[25:], *reversed(keys[:25])):
        assert store.ready() == []
        ask(store, Operation.SET, key, b"1")
    assert store.ready() == [(client, StoreAnswer(1, Outcome.DONE)) for client in ("b", "c")]


def give(store: KeyValues[str], operation: Operation, rank: int, num_ranks: int = 3) -> StoreAnswer | None:
    operands = (b"name", str(rank).encode(), str(num_ranks).encode(), f"of {rank}".encode())
    return ask(store, operation, *operands, client=f"rank {rank}", number=rank)


def test_the_last_rank_ends_the_wait_of_all_and_each_gets_what_it_asked_for() -> None:
    store = KeyValues[str]()
    assert give(store, Operation.GATHER, 2) is None
    assert give(store, Operation.ARRIVE, 0) is None
    assert store.ready() == [] and store.num_keys == 2
    last = give(store, Operation.GATHER, 1)
    assert last is not None and split(last.values[0]) == [b"of 0", b"of 1", b"of 2"]
    assert store.ready() == [
        ("rank 2", StoreAnswer(2, Outcome.DONE, last.values)),
        ("rank 0", StoreAnswer(0, Outcome.DONE)),
    ]


def test_a_rank_that_asks_again_after_all_have_given_gets_the_same_values() -> None:
    store = KeyValues[str]()
    answers = [give(store, Operation.GATHER, rank) for rank in range(3)]
    operands = (b"name", b"0", b"3", b"another value")
    again = ask(store, Operation.GATHER, *operands, client="rank 0", number=2)
    assert again == answers[2]


def test_the_ranks_that_have_given_nothing_are_named() -> None:
    store = KeyValues[str]()
    assert values(store, Operation.ABSENT, b"name", b"3") == (b"0", b"1", b"2")
    give(store, Operation.ARRIVE, 1)
    assert values(store, Operation.ABSENT, b"name", b"3") == (b"0", b"2")
    store.forget("rank 1")
    assert values(store, Operation.ABSENT, b"name", b"3") == (b"0", b"2"), "it has given its value"


def test_a_rank_that_is_gone_gets_no_answer_and_its_value_counts() -> None:
    store = KeyValues[str]()
    give(store, Operation.ARRIVE, 0)
    give(store, Operation.ARRIVE, 1)
    store.forget("rank 0")
    give(store, Operation.ARRIVE, 2)
    assert [client for client, _ in store.ready()] == ["rank 1"]


def test_a_newer_generation_ends_a_gathering() -> None:
    store = KeyValues[str]()
    give(store, Operation.GATHER, 0)
    ask(store, Operation.KEYS, space=Space(4, "job/1"))
    assert store.ready() == [("rank 0", StoreAnswer(0, Outcome.STALE, (b"4",)))]
    assert store.num_keys == 0


@pytest.mark.parametrize(
    "operands",
    [(b"name", b"3", b"3", b""), (b"name", b"-1", b"3", b""), (b"name", b"0", b"2", b""), (b"name", b"0", b"3")],
)
def test_a_value_that_does_not_fit_the_others_is_refused(operands: tuple[bytes, ...]) -> None:
    store = KeyValues[str]()
    give(store, Operation.ARRIVE, 1)
    answer = ask(store, Operation.GATHER, *operands)
    assert answer is not None and answer.outcome is Outcome.REFUSED and answer.values[0]


@pytest.mark.parametrize(
    ("operation", "operands"),
    [
        (Operation.ARRIVE, (b"name", b"0", b"0", b"")),
        (Operation.SET, (b"k",)),
        (Operation.ADD, (b"k", b"one")),
        (Operation.DELETE, ()),
        (Operation.KEYS, (b"k",)),
    ],
)
def test_operands_that_do_not_fit_are_refused(operation: Operation, operands: tuple[bytes, ...]) -> None:
    answer = ask(KeyValues[str](), operation, *operands)
    assert answer is not None and answer.outcome is Outcome.REFUSED and answer.values[0]
