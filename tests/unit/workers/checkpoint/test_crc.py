"""A checksum combined from the checksums of pieces equals the checksum of the whole file."""

import zlib

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal_workers.checkpoint.writer import combine

_UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=60)
"""Other processes may use the cores, which must not fail the test."""


def test_long_pieces_combine_too() -> None:
    first, second = b"ab" * 70_001, bytes(5_000_003)
    assert combine(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


@_UNHURRIED
@given(st.lists(st.binary(max_size=50), max_size=10))
def test_any_number_of_pieces_combine(pieces: list[bytes]) -> None:
    crc = 0
    for piece in pieces:
        crc = combine(crc, zlib.crc32(piece), len(piece))
    assert crc == zlib.crc32(b"".join(pieces))
