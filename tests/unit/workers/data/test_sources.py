"""Which files are read, in which order, and the error if there are none."""

from collections.abc import Callable
from pathlib import Path

import pytest

from shoal_workers.contract.text_data import TextDataConfig
from shoal_workers.data.errors import MissingTextError
from shoal_workers.data.sources import find_sources

ConfigOf = Callable[..., TextDataConfig]


def test_directories_globs_and_files_are_read_once_each_in_order(tmp_path: Path, config_of: ConfigOf) -> None:
    for name in ("b/two.txt", "b/one.txt", "a/three.md", "b/.hidden", "b/__pycache__/x.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    config = config_of(tmp_path / "b" / "two.txt", tmp_path / "*" / "*.*", tmp_path / "a")
    names = [str(Path(source.place).relative_to(tmp_path)) for source in find_sources(config)]
    assert names == ["b/two.txt", "a/three.md", "b/one.txt"]


def test_a_recursive_glob_reaches_deep_files(tmp_path: Path, config_of: ConfigOf) -> None:
    (tmp_path / "x" / "y").mkdir(parents=True)
    (tmp_path / "x" / "y" / "deep.txt").write_text("deep")
    assert [s.name for s in find_sources(config_of(tmp_path / "**" / "*.txt"))] == ["deep.txt"]


def test_the_standard_library_is_python_text_without_packages_and_tests() -> None:
    sources = find_sources(TextDataConfig(corpus="python-stdlib"))
    names = {source.name for source in sources}
    parts = {part for source in sources for part in Path(source.place).parts}
    assert {"argparse.py", "dataclasses.py", "base_events.py"} <= names
    assert not {"site-packages", "test", "tests", "__pycache__"} & parts
    assert sum(source.num_bytes for source in sources) > 5_000_000
    assert sources == find_sources(TextDataConfig(corpus="python-stdlib"))


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("no/such/*.txt", "matches no file"),
        ("no-such-file.txt", "matches no file"),
        ("memory://nothing/here.txt", "names no file"),
        ("memory://nothing/*.txt", "names no file"),
        ("nosuchstore://bucket/key.txt", "nosuchstore"),
        ("simplecache::s3://bucket/key.txt", "chain of stores"),
        ("a" * 5000, "data.paths"),
        ("null\0byte", "data.paths"),
    ],
)
def test_a_missing_path_is_named_with_its_setting(entry: str, expected: str, config_of: ConfigOf) -> None:
    with pytest.raises(MissingTextError, match=r"data\.paths|://") as caught:
        find_sources(config_of(entry))
    assert expected in str(caught.value)
    assert repr(entry)[:40] in str(caught.value)


def test_an_empty_directory_is_named(tmp_path: Path, config_of: ConfigOf) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(MissingTextError, match="exists but contains no file"):
        find_sources(config_of(tmp_path / "empty"))
