from typing import Any

import pytest

from shoal_workers.contract.checks.places import EVERYWHERE, AllowedPlaces, check_places
from shoal_workers.contract.checks.spec_errors import SpecError, parse_spec
from shoal_workers.contract.hugging_face import HF_TASK

ROOTS = AllowedPlaces(
    paths=("/data", "/scratch/shoal"),
    protocols=frozenset({"file", "s3", "https://data.example.com"}),
    closed=("/data/state",),
    opened=("/data/state/ck",),
)
TEXT = {"data": {"paths": ["/data/a/*.txt"]}, "stop": {"steps": 1}}
HF = {"task": HF_TASK, "stop": {"steps": 1}}


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("/data", ""),
        ("/data/a/../b", ""),
        ("file:///scratch/shoal/x", ""),
        ("s3://bucket/key", ""),
        ("S3://bucket/key", ""),
        ("texts/*.txt", ""),
        ("/data/state/ck/job", ""),
        ("/database", "SHOAL_ALLOWED_PATHS: /data, /scratch/shoal"),
        ("/data/../etc", "SHOAL_ALLOWED_PATHS"),
        ("/data/*/../../etc/*", "SHOAL_ALLOWED_PATHS"),
        ("../outside", "SHOAL_ALLOWED_PATHS"),
        ("~/texts", "SHOAL_ALLOWED_PATHS"),
        ("file:///etc", "SHOAL_ALLOWED_PATHS"),
        ("/data/state/shoal.db", "the server's own directory"),
        ("/data/state", "the server's own directory"),
        ("gs://bucket/key", "the protocol gs is not allowed"),
        ("http://169.254.169.254/latest", "the protocol http is not allowed"),
        ("https://data.example.com/a.jsonl", ""),
        ("https://DATA.example.com/a.jsonl", ""),
        ("http://data.example.com/a.jsonl", "the protocol http is not allowed"),
        ("https://data.example.com:8443/a.jsonl", "the protocol https is not allowed"),
        ("https://data.example.com@evil.example.com/a.jsonl", "the protocol https is not allowed"),
        ("https://data.example.com.evil.example.com/a.jsonl", "the protocol https is not allowed"),
        ("simplecache::s3://bucket/key", "the protocol simplecache is not allowed"),
        ("zip://a.txt::/etc/x.zip", "the protocol zip is not allowed"),
    ],
)
def test_a_place_is_below_a_root_or_has_an_allowed_protocol(place: str, words: str) -> None:
    found = ROOTS.refusal(place)
    assert words in found if words else found == ""


def test_links_are_followed_where_they_are_known() -> None:
    assert "SHOAL_ALLOWED_PATHS" in ROOTS.refusal("/data/link", lambda path: "/etc/passwd")


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"checkpoint": {"url": "/etc/x"}}, "checkpoint.url"),
        ({"code": {"working_dir": "/home"}}, "code.working_dir"),
        ({"secrets": {"A": {"file": "/etc/shadow"}}}, "secrets.A.file"),
        ({"data": {"paths": ["/data/a", "/etc/passwd"]}}, "data.paths"),
        (
            {"data": {"sources": [{"path": "/data/a", "weight": 1}, {"path": "/etc/passwd", "weight": 1}]}},
            "data.sources[1].path",
        ),
        ({"data": {"paths": ["/data/a"], "cache_dir": "/etc/x"}}, "data.cache_dir"),
        ({"data": {"paths": ["/data/a"], "tokenizer": "/etc/x"}}, "data.tokenizer"),
        ({**HF, "model": {"path": "/etc/x"}}, "model.path"),
    ],
)
def test_every_place_of_a_spec_is_checked(change: dict[str, Any], path: str) -> None:
    spec = parse_spec(TEXT | change)
    with pytest.raises(SpecError) as refused:
        check_places(spec, ROOTS)
    assert [problem.path for problem in refused.value.problems] == [path]
    check_places(spec, EVERYWHERE)


def test_a_packed_directory_does_not_contain_the_servers_own() -> None:
    spec = parse_spec(TEXT | {"code": {"working_dir": "/data"}})
    with pytest.raises(SpecError, match="it contains the server's own directory"):
        check_places(spec, ROOTS)


def test_the_strings_of_a_users_task_are_its_own() -> None:
    check_places(parse_spec({"task": "mine:Task", "data": {"paths": ["/etc"]}, "stop": {"steps": 1}}), ROOTS)
