"""`python -m shoal_workers.data`: the program behind `shoal data prepare`."""

import json
import os
import subprocess
import sys
from pathlib import Path


def _prepare(tmp_path: Path, data: dict[str, object]) -> subprocess.CompletedProcess[str]:
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps({"data": {**data, "cache_dir": str(tmp_path / "cache")}}))
    command = [sys.executable, "-m", "shoal_workers.data", str(spec), "--json"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_it_prepares_the_shards_and_prints_their_directory(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("to be or not to be " * 100)
    done = _prepare(tmp_path, {"paths": [str(tmp_path / "a.txt")]})
    assert done.returncode == 0, done.stderr
    assert (Path(json.loads(done.stdout)["directory"]) / "tokens-00000.bin").exists()


def test_missing_files_are_named_and_fail(tmp_path: Path) -> None:
    done = _prepare(tmp_path, {"paths": [str(tmp_path / "nothing.txt")]})
    assert done.returncode == 1
    assert "nothing.txt" in done.stderr and "data.paths" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_spec_may_come_from_standard_input(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("to be or not to be " * 100)
    data = {"paths": [str(tmp_path / "a.txt")], "cache_dir": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "shoal_workers.data", "-", "--json"]
    text = json.dumps({"data": data})
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, input=text, env=environment)
    assert (Path(json.loads(done.stdout)["directory"]) / "tokens-00000.bin").exists(), done.stderr
    assert list(temporary.iterdir()) == [], "nothing is left behind, also if it is killed"


def test_each_source_of_a_mixture_is_prepared_and_printed(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"body": f"to be or not to be {name} " * 100}) + "\n")
    sources = [{"path": str(tmp_path / f"{name}.jsonl"), "weight": 1} for name in ("a", "b")]
    done = _prepare(tmp_path, {"sources": sources, "field": "body"})
    assert done.returncode == 0, done.stderr
    directories = [Path(one["directory"]) for one in json.loads(done.stdout)["sources"]]
    assert len(set(directories)) == 2
    assert all((directory / "tokens-00000.bin").exists() for directory in directories)
