"""What some tests need beyond Python packages. Where it is missing they are skipped, in words.

The environment variable SHOAL_REQUIRE, a comma-separated list, turns such a skip into a failure: continuous integration
sets it to what it has installed.
"""

import os
import shutil

import pytest


def require(name: str, *programs: str) -> str:
    """The path of the first of the programs that is installed. `name`: what SHOAL_REQUIRE calls them."""
    found = next((path for program in programs if (path := shutil.which(program))), None)
    if found is None:
        missing(name, f"{' or '.join(programs)} is not installed")
    assert found is not None
    return found


def missing(name: str, reason: str) -> None:
    """Skips the test, or fails it where SHOAL_REQUIRE lists the name."""
    required = {part.strip() for part in os.environ.get("SHOAL_REQUIRE", "").split(",")}
    if name in required:
        pytest.fail(f"SHOAL_REQUIRE lists {name}, but {reason}", pytrace=False)
    pytest.skip(reason)
