"""The shards of a node on its local disk: bounded, and nothing in use is deleted."""

import os
from pathlib import Path

import pytest

from shoal_workers.data.errors import CacheError
from shoal_workers.data.streaming.cache import Claim, NoClaim, ShardCache


@pytest.fixture
def cache(tmp_path: Path) -> ShardCache:
    return ShardCache(tmp_path / "shards", 300)


def fill(cache: ShardCache, name: str, num_bytes: int = 100, used_at: int = 0) -> None:
    """Puts a shard there, last used at a second of its own."""
    claim = cache.claim(name, num_bytes)
    assert isinstance(claim, Claim), claim
    claim.write(0, b"x" * num_bytes)
    cache.commit(claim)
    os.utime(claim.whole, (used_at, used_at))


def content(cache: ShardCache, name: str) -> bytes | None:
    held = cache.open_shard(name)
    if held is None:
        return None
    content = held.path.read_bytes()
    held.close()
    return content


def test_a_shard_is_there_once_all_of_it_is(cache: ShardCache) -> None:
    claim = cache.claim("s3://b/1.mds", 6)
    assert isinstance(claim, Claim)
    claim.write(3, b"def")
    assert content(cache, "s3://b/1.mds") is None
    claim.write(0, b"abc")
    cache.commit(claim)
    assert content(cache, "s3://b/1.mds") == b"abcdef"
    assert cache.claim("s3://b/1.mds", 6) is NoClaim.PRESENT
    assert claim.whole.suffix == ".mds", "the suffix says the format"


def test_a_part_takes_its_whole_room_from_the_begin(cache: ShardCache) -> None:
    assert isinstance(cache.claim("1", 200), Claim)
    assert cache.num_bytes() == 200
    assert cache.claim("2", 101) is NoClaim.FULL
    assert isinstance(cache.claim("3", 100), Claim)


def test_the_shard_that_was_not_used_for_the_longest_time_goes_first(cache: ShardCache) -> None:
    for number, used_at in ((1, 30), (2, 10), (3, 20)):
        fill(cache, str(number), used_at=used_at)
    fill(cache, "4", 150)
    assert [content(cache, str(number)) is None for number in (1, 2, 3, 4)] == [False, True, True, False]
    assert cache.num_bytes() <= cache.max_bytes


def test_opening_a_shard_is_using_it(cache: ShardCache) -> None:
    for number in (1, 2, 3):
        fill(cache, str(number), used_at=number)
    assert content(cache, "1") is not None
    assert cache.has("2")
    fill(cache, "4")
    assert [cache.has(str(number)) for number in (1, 2, 3)] == [True, True, False]


def test_a_shard_in_use_and_one_that_is_needed_first_are_not_deleted(cache: ShardCache) -> None:
    for number in (1, 2, 3):
        fill(cache, str(number), used_at=number)
    held = [cache.open_shard("1"), cache.open_shard("2")]
    assert cache.claim("4", 100, keep=["3"]) is NoClaim.FULL
    for file in held:
        assert file is not None
        file.close()
    assert isinstance(cache.claim("4", 100, keep=["3"]), Claim)
    assert content(cache, "3") is not None


def test_a_shard_is_fetched_once_at_a_time(cache: ShardCache) -> None:
    claim = cache.claim("1", 100)
    assert isinstance(claim, Claim)
    assert cache.claim("1", 100) is NoClaim.FETCHED_BY_OTHER
    cache.abandon(claim)
    assert cache.num_bytes() == 0
    assert isinstance(cache.claim("1", 100), Claim)


def test_a_shard_that_can_never_fit_and_a_directory_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(CacheError, match=r"s3://b/1 has 101 bytes, and cache_bytes=100 is less"):
        ShardCache(tmp_path, 100).claim("s3://b/1", 101)
    (tmp_path / "file").touch()
    with pytest.raises(CacheError, match=r"cache_dir .*file/below cannot be used"):
        ShardCache(tmp_path / "file" / "below", 100)
