"""A commit and the values that follow it survive encoding, bit for bit; anything else is refused."""

import pytest

from shoal_workers.snapshot_store.log.records import START_BYTES, Commit, CommitBlob, decode, encode, previous_of


def _blob() -> CommitBlob:
    commit = Commit(
        step=12,
        previous=10,
        is_bf16=False,
        unscale=1 / 3,
        clip=0.1 + 0.2,
        lrs=(1e-3 / 7, 5e-324),
        counts=(12, 0, 3),
        changed=(("model.running", 4), ("model.empty", 0)),
        extra_bytes=7,
    )
    return CommitBlob(commit, (b"\x00\xff\x01\x02", b""), b'{"a":1}')


def test_a_commit_survives_encoding() -> None:
    data = encode(_blob())
    assert decode(data) == _blob()
    assert previous_of(data[:START_BYTES]) == 10


@pytest.mark.parametrize("cut", [0, 5, START_BYTES, START_BYTES + 9, -1])
def test_a_commit_that_was_cut_off_is_refused(cut: int) -> None:
    with pytest.raises(ValueError, match=r"commit|bytes of values"):
        decode(encode(_blob())[:cut])


def test_the_start_of_a_commit_that_was_cut_off_is_refused() -> None:
    with pytest.raises(ValueError, match="longer"):
        previous_of(b"123")
