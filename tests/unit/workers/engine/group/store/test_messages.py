from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_workers.engine.group.store.messages import (
    MAX_FRAME_BYTES,
    Operation,
    Outcome,
    Space,
    StoreAnswer,
    StoreRequest,
    pack,
    take_frame,
)


@given(st.lists(st.lists(st.binary(max_size=9), max_size=4), max_size=4), st.integers(0, 60))
def test_frames_arrive_whole_and_in_order_however_they_are_cut(frames: list[list[bytes]], cut: int) -> None:
    data = b"".join(map(pack, frames))
    buffer, found = bytearray(data[:cut]), []
    while (fields := take_frame(buffer)) is not None:
        found.append(fields)
    buffer += data[cut:]
    while (fields := take_frame(buffer)) is not None:
        found.append(fields)
    assert found == frames and not buffer


@given(st.binary(max_size=40))
def test_any_bytes_are_a_frame_an_incomplete_one_or_refused(data: bytes) -> None:
    buffer = bytearray(data)
    try:
        fields = take_frame(buffer)
    except ValueError:
        return
    assert fields is None or pack(fields) == data[: len(data) - len(buffer)]


def test_requests_and_answers_survive_the_wire() -> None:
    request = StoreRequest(12, Operation.COMPARE_SET, Space(3, "job/1"), (b"k", b"", b"\xff"))
    answer = StoreAnswer(12, Outcome.DONE, (b"\xff",))
    assert StoreRequest.parse(take_frame(bytearray(request.pack())) or []) == request
    assert StoreAnswer.parse(take_frame(bytearray(answer.pack())) or []) == answer


@pytest.mark.parametrize("fields", [[], [b"1", b"set", b"x", b"s"], [b"1", b"unknown", b"1", b"s"]])
def test_what_is_not_a_request_is_refused(fields: list[bytes]) -> None:
    with pytest.raises(ValueError):
        StoreRequest.parse(fields)


def test_a_frame_that_is_too_long_is_refused_before_it_arrives() -> None:
    with pytest.raises(ValueError, match="longer than any message"):
        take_frame(bytearray((MAX_FRAME_BYTES + 1).to_bytes(4, "little")))
