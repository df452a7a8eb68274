"""Patterns of `.shoalignore` mean what git takes them to mean."""

import os
import subprocess
from pathlib import Path

import pytest

from shoal_service.control.ignore_rules import IgnoreRules

FILES = (
    *("train.py", "model.pt", "a.log", "b.log", "#odd", "!odd", "end ", "x[1]", "data/a.bin", "data/b/c.bin"),
    *(
        "pkg/data/a.bin",
        "pkg/model.pt",
        "pkg/deep/er/model.pt",
        "runs/1/out.txt",
        "pkg/runs/1/out.txt",
        "f1",
        "f2",
        "fa",
    ),
)


def _kept(text: str) -> list[str]:
    """What a packer keeps that does not enter ignored directories."""
    rules = IgnoreRules.parse(text)

    def is_kept(path: str) -> bool:
        folders = [path[:at] for at, character in enumerate(path) if character == "/"]
        return not rules.ignore(path, is_folder=False) and not any(rules.ignore(one, is_folder=True) for one in folders)

    return sorted(filter(is_kept, FILES))


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tree")
    for name in FILES:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    subprocess.run(["git", "init", "--quiet"], cwd=root, check=True)
    return root


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# comment\n\n*.pt\n",
        "data\n",
        "data/\n",
        "/data\n",
        "pkg/data\n",
        "/pkg/data/\n",
        "runs/*/out.txt",
        "**/runs",
        "pkg/**",
        "pkg/**/model.pt",
        "**/*.pt",
        "*\n!train.py\n",
        "*.log\n!b.log\n",
        "data/\n!data/a.bin\n",
        "data/*\n!data/a.bin\n",
        "\\#odd\n\\!odd\n",
        "end\\ ",
        "end   ",
        "f[0-9]",
        "f[!0-9]",
        "f[]a]",
        "f?",
        "x\\[1\\]",
        "f[z-a]",
        "/*\n!/pkg\n",
        "train.py/",
        "a.log\r\n",
    ],
)
def test_the_same_files_are_left_out_as_by_git(text: str, tree: Path) -> None:
    (tree / ".git" / "patterns").write_bytes(text.encode())
    command = ["git", "ls-files", "--others", "-z", "--exclude-from=.git/patterns"]
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    listed = subprocess.run(command, cwd=tree, env=environment, check=True, capture_output=True, text=True).stdout
    assert _kept(text) == sorted(filter(None, listed.split("\0")))
