"""`code.pip`: real pip, real wheels in a directory, an interpreter that has other packages already; no network."""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest

from shoal_workers.contract.checks.places import AllowedPlaces, PipSource, check_places
from shoal_workers.contract.checks.spec_errors import SpecError, parse_spec
from shoal_workers.contract.exception_causes import Origin
from shoal_workers.contract.messages import Phase
from shoal_workers.contract.user_code import CodeSpec
from shoal_workers.engine.process import packages
from shoal_workers.engine.process.engine_error import engine_error
from shoal_workers.engine.process.packages import PackagesNotInstalled, add_packages, installed


def wheel(directory: Path, name: str, version: str = "1.0", requires: tuple[str, ...] = ()) -> None:
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": f"VERSION = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        + "".join(f"Requires-Dist: {one}\n" for one in requires),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},sha256={hashlib.sha256(text.encode()).hexdigest()},\n" for path, text in files.items())
    with zipfile.ZipFile(directory / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
        archive.writestr(f"{info}/RECORD", "".join(f"{path},,\n" for path in files) if record else "")


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    directory = tmp_path / "wheels"
    directory.mkdir()
    wheel(directory, "shoalfish", requires=("shoalfin>=2", "numpy"))
    wheel(directory, "shoalfin", "2.5")
    wheel(directory, "shoalold", requires=("pydantic<2",))
    return directory


@pytest.fixture
def restored() -> Any:
    """`sys.path` and PYTHONPATH as before."""
    before, variable = list(sys.path), os.environ.get("PYTHONPATH")
    yield
    sys.path[:] = before
    os.environ.pop("PYTHONPATH", None)
    if variable is not None:
        os.environ["PYTHONPATH"] = variable
    for name in ("shoalfish", "shoalfin"):
        sys.modules.pop(name, None)


def test_a_package_and_what_it_requires_are_installed_once_on_a_node_and_imported(
    wheels: Path, tmp_path: Path, restored: None
) -> None:
    """Two workers that start together install once. A job that requires another package has another directory."""
    code, root, notes = CodeSpec(pip=("shoalfish",), wheels=str(wheels)), tmp_path / "packages", [[], []]
    runs = [threading.Thread(target=installed, args=(code, said.append, root)) for said in notes]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    assert sum("installing shoalfish" in said for said in notes) == 1
    later: list[str] = []
    directory = add_packages(code, later.append, root)
    assert directory is not None and importlib.import_module("shoalfin").VERSION == "2.5"
    assert not (directory / "numpy").exists(), "what the interpreter has is not installed again"
    assert sys.path.count(str(directory)) == 1 and str(directory) in os.environ["PYTHONPATH"]
    made = directory.stat().st_ino
    assert add_packages(code, later.append, root) == directory
    assert directory.stat().st_ino == made and later == []
    other = CodeSpec(pip=("shoalfin",), wheels=str(wheels))
    assert installed(other, later.append, root) != directory and later == ["installing shoalfin"]
    assert add_packages(CodeSpec(), later.append) is None


@pytest.mark.cells(1, 2)
@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (
            "shoalshark==3",
            ("code.pip: shoalshark==3 cannot be installed from code.wheels", "Put a wheel of it for Python"),
        ),
        ("shoalfin>=9", ("code.pip: shoalfin>=9 cannot be installed", "2.5")),
        ("shoalold", ("code.pip: shoalold", "pydantic", "depends on pydantic<2", "requested (constraint) pydantic==")),
    ],
)
def test_a_failed_install_names_the_package_and_is_the_users(
    wheels: Path, tmp_path: Path, wanted: str, words: tuple[str, ...]
) -> None:
    with pytest.raises(PackagesNotInstalled) as raised:
        installed(CodeSpec(pip=(wanted,), wheels=str(wheels)), lambda _: None, tmp_path / "packages")
    assert all(one in str(raised.value) for one in words), str(raised.value)
    report = engine_error(raised.value, Phase.PREPARING)
    assert report.origin is Origin.TASK and report.sentence == str(raised.value), "without the name of an exception"
    assert [
        path for path in (tmp_path / "packages").iterdir() if path.suffix not in (".lock", ".progress", ".use")
    ] == [], "nothing half done"


def test_a_missing_directory_and_an_interpreter_without_pip_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PackagesNotInstalled, match="nowhere cannot be read on this node"):
        installed(CodeSpec(pip=("a",), wheels=str(tmp_path / "nowhere")), lambda _: None, tmp_path)
    assert packages._pip_command()[0] == sys.executable


@pytest.mark.parametrize(
    "text", ["--index-url=http://x", "-r file", "./a.whl", "/tmp/a", "a @ http://x/a.whl", "git+https://x", "a b/c", ""]
)
def test_options_urls_and_paths_are_no_requirements(text: str) -> None:
    with pytest.raises(ValueError, match="pip"):
        CodeSpec(pip=(text,))


@pytest.mark.parametrize("text", ["einops", "einops==0.8.1", "a[b,c] >=1.0,!=1.5", 'a~=2.0; python_version > "3.10"'])
def test_names_with_versions_extras_and_markers_are_requirements(text: str) -> None:
    assert CodeSpec(pip=(text,)).pip == (text,)


def test_only_a_server_that_allows_it_installs_packages(wheels: Path) -> None:
    document = {"stop": {"steps": 1}, "data": {"corpus": "python-stdlib"}}
    spec = parse_spec({**document, "code": {"pip": ["einops"]}})
    offline = parse_spec({**document, "code": {"pip": ["einops"], "wheels": str(wheels)}})
    check_places(spec, AllowedPlaces(pip=PipSource.INDEX))
    check_places(offline, AllowedPlaces(pip=PipSource.WHEELS))
    for refused, allowed, words in (
        (spec, AllowedPlaces(pip=PipSource.NEVER), "SHOAL_ALLOW_PIP is never"),
        (spec, AllowedPlaces(pip=PipSource.WHEELS), "SHOAL_ALLOW_PIP is wheels"),
        (offline, AllowedPlaces(pip=PipSource.INDEX, paths=("/data",)), "SHOAL_ALLOWED_PATHS"),
    ):
        with pytest.raises(SpecError, match=words):
            check_places(refused, allowed)
