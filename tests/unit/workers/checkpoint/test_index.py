"""The index is JSON both ways, and refuses what it is not."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal_workers.checkpoint.index import IndexItem, ShardIndex, jsonable

_UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=30)
"""Other processes may use the cores, which must not fail the test."""

_ITEM = IndexItem(
    fqn="a.b", dtype="bfloat16", shape=(4, 2), offsets=(2, 0), sizes=(2, 2), file_offset=64, nbytes=8, crc32=5
)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@_UNHURRIED
@given(st.dictionaries(st.text(), _VALUES))
def test_index_survives_storage(extra: dict[str, object]) -> None:
    index = ShardIndex(rank=1, world_size=2, generation=3, step=4, items=(_ITEM,), extra=jsonable(extra))
    assert ShardIndex.from_json(index.to_json()) == index


def test_extra_comes_back_as_json_has_it() -> None:
    assert jsonable({"a": (1, 2), "b": {3: None}}) == {"a": [1, 2], "b": {"3": None}}


@pytest.mark.parametrize("extra", [{"a": float("nan")}, {"a": object()}, {"a": b"bytes"}])
def test_what_json_lacks_is_refused(extra: dict[str, object]) -> None:
    with pytest.raises((TypeError, ValueError)):
        jsonable(extra)


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"format": 2}', b"\x80\x04pickle"])
def test_anything_else_is_not_an_index(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        ShardIndex.from_json(data)
