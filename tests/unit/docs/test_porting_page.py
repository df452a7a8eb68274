"""What docs/porting.md shows of a script is in that script, which a test runs."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
_SHOWN = re.compile(r"<!-- lines of (\S+) -->\n```python\n(.*?)```", re.DOTALL)
SHOWN = _SHOWN.findall((ROOT / "docs" / "porting.md").read_text("utf-8"))


@pytest.mark.parametrize(("file", "block"), SHOWN, ids=[file for file, _ in SHOWN])
def test_the_lines_shown_are_those_of_the_script_in_its_order(file: str, block: str) -> None:
    rest = iter([line.strip() for line in (ROOT / file).read_text("utf-8").splitlines()])
    for line in block.splitlines():
        if line.strip() not in ("", "..."):
            assert line.strip() in rest, f"{file} has no line {line.strip()!r} here"


def test_every_library_has_its_lines() -> None:
    assert [Path(file).parent.name for file, _ in SHOWN] == ["fsdp", "accelerate", "trainer", "lightning"]
