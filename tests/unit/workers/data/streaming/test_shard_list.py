"""Shards by pattern, list and function."""

import pytest

from shoal_workers.data.streaming import shard_list


def test_ranges_of_a_pattern_count_from_the_last_one_on() -> None:
    shards = shard_list.of_pattern("s3://b/{08..11}/part-{0..2}.tar?v={7..7}")
    assert shards.num_shards == 12
    assert [shards.name(number) for number in (0, 2, 3, 11)] == [
        "s3://b/08/part-0.tar?v=7",
        "s3://b/08/part-2.tar?v=7",
        "s3://b/09/part-0.tar?v=7",
        "s3://b/11/part-2.tar?v=7",
    ]


def test_ten_million_shards_are_no_list() -> None:
    shards = shard_list.of_pattern("https://host/c4/{0000000..9999999}.mds")
    assert (shards.num_shards, shards.name(1234567)) == (10**7, "https://host/c4/1234567.mds")


def test_a_name_without_a_range_is_one_shard() -> None:
    shards = shard_list.of_pattern("https://host/a.mds")
    assert (shards.num_shards, shards.name(0)) == (1, "https://host/a.mds")


def test_a_range_that_runs_backwards_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shards='x\{9\.\.1\}': the range 9\.\.1 has no number"):
        shard_list.of_pattern("x{9..1}")


def test_a_copy_elsewhere_is_the_same_data_and_other_shards_are_not() -> None:
    here, there = shard_list.of_pattern("s3://b/c/{0..9}.tar"), shard_list.of_pattern("https://mirror/d/{0..9}.tar")
    assert here.identity == there.identity != shard_list.of_pattern("s3://b/c/{0..8}.tar").identity
    names = ["x/1.tar", "x/2.tar"]
    moved = shard_list.of_names(["gs://y/z/1.tar", "gs://y/z/2.tar"])
    assert shard_list.of_names(names).identity == moved.identity != shard_list.of_names(names[::-1]).identity
    first = shard_list.of_function(lambda number: f"a/{number}", 5)
    assert first.identity == shard_list.of_function(lambda number: f"b/{number}", 5).identity
    assert first.identity != shard_list.of_function(lambda number: f"a/{number}", 6).identity


def test_a_function_needs_the_number_and_a_list_a_name() -> None:
    with pytest.raises(ValueError, match=r"num_shards=None: .* Give num_shards"):
        shard_list.of_function(str, None)
    with pytest.raises(ValueError, match=r"shards=\[\]"):
        shard_list.of_names([])
