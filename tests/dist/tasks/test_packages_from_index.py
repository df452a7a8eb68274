"""`code.pip` from the index that pip is set up for on this machine: a package without dependencies, and a version that
does not exist. Skipped where no index answers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal_workers.contract.user_code import CodeSpec
from shoal_workers.engine.process.packages import PackagesNotInstalled, installed

PACKAGE, VERSION = "inflection", "0.5.1"
"""9 kB of Python, which nothing here depends on."""
_ANSWER_S = 60


@pytest.fixture(scope="module", autouse=True)
def _index(tmp_path_factory: pytest.TempPathFactory) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--retries", "0", "--timeout", "20"]
    command += ["--disable-pip-version-check", "--dest", str(tmp_path_factory.mktemp("probe")), f"{PACKAGE}=={VERSION}"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_S, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip(f"pip's index does not answer here within {_ANSWER_S} s")
    if asked.returncode:
        pytest.skip(f"pip's index does not answer here: {asked.stderr.strip().splitlines()[-1]}")


def test_a_package_of_the_index_is_installed_once_and_can_be_imported(tmp_path: Path) -> None:
    notes: list[str] = []
    code = CodeSpec(pip=(f"{PACKAGE}=={VERSION}",))
    directory = installed(code, notes.append, tmp_path)
    assert installed(code, notes.append, tmp_path) == directory and notes == [f"installing {PACKAGE}=={VERSION}"]
    program = f"import {PACKAGE}; print({PACKAGE}.__version__, {PACKAGE}.pluralize('shoal'))"
    environment = {**os.environ, "PYTHONPATH": str(directory)}
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout == f"{VERSION} shoals\n"


def test_a_version_that_the_index_does_not_have_is_named(tmp_path: Path) -> None:
    with pytest.raises(PackagesNotInstalled) as raised:
        installed(CodeSpec(pip=(f"{PACKAGE}==999.0",)), lambda _: None, tmp_path)
    words = str(raised.value)
    assert words.startswith(f"code.pip: {PACKAGE}==999.0 cannot be installed from pip's index"), words
    assert "Check its name and version" in words and VERSION in words
