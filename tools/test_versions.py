"""Runs a sample of the tests with other versions of Python, torch and Ray than `make setup` installs.

    python tools/test_versions.py                      all combinations, one after the other
    python tools/test_versions.py oldest newest        these
    python tools/test_versions.py --copy ray-2.57      on a copy of the environment of `make setup`
    python tools/test_versions.py --list               what there is
    python tools/test_versions.py --page               write the results of the last run of each into docs/install.md

Each combination gets a new virtual environment in build/versions/NAME: what `make setup` installs, with other lines for
torch and Ray in `constraints.txt` and in the requirements, so that a release outside of the package's range can be
tried too. The environment is deleted afterwards, unless --keep is given: with torch's CUDA libraries, which also run
without a GPU, it takes 7 GB. The sample is in `SAMPLE`: what uses the most private names of torch
(`torch_internals.py`) and of Ray (`ray_internals.py`). Results are in build/versions/results.json and results.md, the
output of pip and pytest in build/versions/NAME.log. The exit status is 1 if a test failed, and 3 if none did but an
index or this machine lacks a release.

With --copy only what differs is installed: another Ray takes half a minute, since torch's CPU build stays. CI runs one
such combination.

Not every product is run: each torch with the newest Ray, each Ray with the torch of constraints.txt, each Python with
both of constraints.txt, all of the oldest, and all of the newest. What constraints.txt pins, on Python 3.11, is what
`make test` runs. Called by `make test-versions`; the interpreters are
found on the PATH as `python3.12`, or named with --python 3.12=PATH.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "versions"
PAGE = ROOT / "docs" / "install.md"
NOT_RUN = "not run"
_MISSING = 3
"""Exit status: no test failed, but not all combinations could be run here."""
BEGIN, END = "<!-- versions: written by tools/test_versions.py --page -->", "<!-- end of versions -->"
_TEST_TIMEOUT_S = 900
"""For one test. Several times what it needs on a machine that does nothing else."""
_EXTRAS = ("dev", "postgres", "s3", "hf")
_REPLACED = ("torch", "ray")
"""Lines of constraints.txt that a combination does not take over."""


@dataclass(frozen=True, kw_only=True)
class Combination:
    """One environment: Python as X.Y, torch and Ray as they are pinned."""

    name: str
    python: str
    torch: str
    ray: str


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run of the sample said. `failed`: the tests that did not pass, or what kept them from running. `missing`:
    the release that this machine or its package index lacks; nothing was run, and nothing is stored."""

    combination: Combination
    day: str
    passed: int
    failed: tuple[str, ...]
    install_s: float
    tests_s: float
    missing: str = ""

    @property
    def is_good(self) -> bool:
        return self.passed > 0 and not self.failed


COMBINATIONS = (
    Combination(name="newest", python="3.13", torch="2.15.0", ray="2.60.0"),
    Combination(name="oldest", python="3.11", torch="2.12.1", ray="2.57.1"),
    Combination(name="torch-2.15", python="3.11", torch="2.15.0", ray="2.60.0"),
    Combination(name="torch-2.14", python="3.11", torch="2.14.1", ray="2.60.0"),
    Combination(name="torch-2.12", python="3.11", torch="2.12.1", ray="2.60.0"),
    Combination(name="ray-2.57", python="3.11", torch="2.13.0", ray="2.57.1"),
    Combination(name="ray-2.58", python="3.11", torch="2.13.0", ray="2.58.1"),
    Combination(name="ray-2.59", python="3.11", torch="2.13.0", ray="2.59.0"),
    Combination(name="python-3.13", python="3.13", torch="2.13.0", ray="2.60.0"),
    Combination(name="python-3.12", python="3.12", torch="2.13.0", ray="2.60.0"),
)

_RUNTIME = "tests/dist/model/test_runtime.py"
_LAYOUT = "tests/dist/parallel/test_layouts.py::test_a_layout_trains_as_one_process_does"
SAMPLE = {
    "unit": (
        "tests/unit/workers/engine/group",
        "tests/unit/workers/engine/parallel",
        "tests/unit/workers/tasks/test_balance.py",
        "tests/unit/service/cluster",
    ),
    "dist": (
        f"{_LAYOUT}[experts fsdp2 optimizer recompute_selective bf16]",
        f"{_LAYOUT}[experts pp2 dualpipev 1-1-1-1]",
        f"{_RUNTIME}::test_survivors_keep_their_model_and_the_losses_do_not_change[pp2xtp2-backward]",
        f"{_RUNTIME}::test_a_gather_that_is_under_way_when_a_rank_dies_is_left",
        "tests/dist/group/test_re_forming.py::test_survivors_keep_their_model_when_a_standby_replaces_the_dead_rank",
        "tests/dist/checkpoint/test_layouts.py",
        "tests/dist/process/test_fork_server.py::test_an_actor_ends_with_its_raylet",
    ),
    "ray": (
        "tests/ray/test_contracts.py::test_the_implementations_over_ray_pass_the_contracts_of_their_protocols",
        "tests/ray/scheduling/test_prestart.py",
    ),
    "chaos": ("tests/chaos/test_worker_death.py::test_a_killed_worker_costs_few_steps_and_the_group_grows_back",),
}
"""Kind of test -> tests. All kinds run in one pytest, so those of Ray share one cluster."""


def main() -> int:
    options = _options()
    chosen = [one for one in COMBINATIONS if not options.names or one.name in options.names]
    if unknown := set(options.names) - {one.name for one in COMBINATIONS}:
        print(f"no combination is named {', '.join(sorted(unknown))}; see --list", file=sys.stderr)
        return 2
    if options.list:
        for one in COMBINATIONS:
            print(f"{one.name:12} Python {one.python}, torch {one.torch}, Ray {one.ray}")
        return 0
    if options.page:
        PAGE.write_text(page(PAGE.read_text("utf-8"), _stored()), "utf-8")
        return 0
    interpreters = dict(text.split("=", 1) for text in options.python)
    tests = [test for kind in options.kinds.split(",") for test in SAMPLE[kind]]
    BUILD.mkdir(parents=True, exist_ok=True)
    results = []
    for number, combination in enumerate(chosen, 1):
        print(f"[{number}/{len(chosen)}] {combination}", flush=True)
        results.append(_try(combination, interpreters, tests, keep=options.keep, copy=options.copy))
        print(f"    {_verdict(results[-1])}", flush=True)
        if not results[-1].missing:
            _store(results[-1])
    print(table(_stored()))
    run = [result for result in results if not result.missing]
    if not all(result.is_good for result in run):
        return 1
    return 0 if run == results else _MISSING


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="a sample of the tests with other versions")
    parser.add_argument("names", nargs="*", help="combinations; none: all")
    parser.add_argument("--list", action="store_true", help="print the combinations")
    parser.add_argument("--page", action="store_true", help="write the stored results into docs/install.md")
    parser.add_argument("--copy", action="store_true", help="install into a copy of this Python's environment")
    parser.add_argument("--keep", action="store_true", help="keep the environments, and use those that are there")
    parser.add_argument("--kinds", default=",".join(SAMPLE), help="kinds of tests, separated by commas")
    parser.add_argument("--python", action="append", default=[], metavar="X.Y=PATH", help="an interpreter")
    return parser.parse_args()


def _try(
    combination: Combination, interpreters: dict[str, str], tests: Sequence[str], *, keep: bool, copy: bool
) -> Result:
    environment = BUILD / combination.name
    with (BUILD / f"{combination.name}.log").open("w", encoding="utf-8") as log:
        started = time.monotonic()
        passed, failed, missing = 0, (), ""
        try:
            if not (keep and (environment / ".ready").exists()):
                _install(combination, interpreters, log, copy=copy)
            installed = time.monotonic()
            passed, failed = _test(environment / "bin" / "python", tests, log)
        except _Missing as error:
            installed, missing = time.monotonic(), str(error)
        except _NotInstalled as error:
            installed, failed = time.monotonic(), (str(error),)
        finally:
            if not keep:
                shutil.rmtree(environment, ignore_errors=True)
    return Result(
        combination=combination,
        day=f"{datetime.now(UTC):%Y-%m-%d}",
        passed=passed,
        failed=failed,
        install_s=round(installed - started),
        tests_s=round(time.monotonic() - installed),
        missing=missing,
    )


class _NotInstalled(Exception):
    pass


class _Missing(Exception):
    pass


def _install(combination: Combination, interpreters: dict[str, str], log: TextIO, *, copy: bool) -> None:
    """Raises _Missing or _NotInstalled."""
    environment = BUILD / combination.name
    shutil.rmtree(environment, ignore_errors=True)
    if copy:
        _copy(combination, environment)
    else:
        interpreter = interpreters.get(combination.python) or shutil.which(f"python{combination.python}")
        if interpreter is None:
            raise _Missing(f"python{combination.python} is not on the PATH, and --python does not name it")
        _run([interpreter, "-m", "venv", str(environment)], log)
    constraints = environment / "constraints.txt"
    constraints.write_text(constraints_of(combination, (ROOT / "constraints.txt").read_text("utf-8")), "utf-8")
    pip = [str(environment / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    pip.append("--no-compile")  # compiling all of torch takes a minute, and the sample imports a part of it
    packages = requirements_of(combination, tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"])
    if _run([*pip, "-c", str(constraints), *packages], log):
        found = re.findall(r"No matching distribution found for (\S+)", Path(log.name).read_text("utf-8"))
        if found:
            raise _Missing(f"the package index has no {found[-1]} for Python {combination.python} on this machine")
        raise _NotInstalled("the packages could not be installed together")
    if _run([*pip, "--no-deps", "-e", str(ROOT)], log):
        raise _NotInstalled("Shoal could not be installed")
    (environment / ".ready").touch()


def _copy(combination: Combination, environment: Path) -> None:
    """Copy the environment of this Python. Files are hard links: pip replaces files, and never writes into one."""
    if combination.python != f"{sys.version_info.major}.{sys.version_info.minor}":
        raise _Missing(f"--copy copies an environment of Python {sys.version_info.major}.{sys.version_info.minor}")
    source = Path(sys.prefix).resolve()
    shutil.copytree(source, environment, symlinks=True, copy_function=os.link)
    for script in (environment / "bin").iterdir():
        if script.is_file() and not script.is_symlink() and (text := script.read_bytes()).startswith(b"#!"):
            script.unlink()
            script.write_bytes(text.replace(bytes(source / "bin"), bytes(environment / "bin"), 1))
            script.chmod(0o755)


def constraints_of(combination: Combination, pinned: str) -> str:
    """The constraints of an environment. `pinned`: the text of constraints.txt."""
    kept = [line for line in pinned.splitlines() if re.split("[=<>]", line)[0].lower() not in _REPLACED]
    return "\n".join([*kept, f"torch=={combination.torch}", f"ray=={combination.ray}"]) + "\n"


def requirements_of(combination: Combination, project: dict[str, Any]) -> list[str]:
    """What the package requires, with these releases in place of its ranges. `project`: of pyproject.toml."""
    extras = (one for extra in _EXTRAS for one in project["optional-dependencies"][extra])
    required = [re.sub(r"\s+#.*", "", one) for one in (*project["dependencies"], *extras)]
    releases = {"torch": combination.torch, "ray": combination.ray}
    found = []
    for one in required:
        name = re.split(r"[\[<>=!~ ]", one)[0]
        found.append(re.sub(r"[<>=!~].*", "", one) + f"=={releases[name]}" if name in releases else one)
    return found


def _test(python: Path, tests: Sequence[str], log: TextIO) -> tuple[int, tuple[str, ...]]:
    """How many tests passed, and the names of those that did not."""
    report = python.parent.parent / "report.xml"
    command = [str(python), "-m", "pytest", "-q", "-rfE", "-m", "not soak", f"--timeout={_TEST_TIMEOUT_S}", *tests]
    code = _run([*command, f"--junit-xml={report}"], log)
    if not report.exists():
        return 0, (f"pytest ended with {code}",)
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    passed = [case for case in cases if case not in failed and case.find("skipped") is None]
    names = tuple(sorted({f"{case.get('classname')}::{case.get('name')}" for case in failed}))
    return len(passed), names or (() if code == 0 else (f"pytest ended with {code}",))


def _run(command: Sequence[str], log: TextIO) -> int:
    log.write(f"$ {' '.join(command)}\n")
    log.flush()
    # PYTHONPATH would bring the modules of another tree. With PYTHONDONTWRITEBYTECODE each process would compile all of
    # torch and Ray anew, since pip has not: a server then needs minutes to start on a busy machine.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment["OMP_NUM_THREADS"] = "1"
    ran = subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False)
    return ran.returncode


def _stored() -> list[Result]:
    file = BUILD / "results.json"
    rows = json.loads(file.read_text("utf-8")) if file.exists() else []
    found = {
        row["combination"]["name"]: Result(
            **{**row, "combination": Combination(**row["combination"]), "failed": tuple(row["failed"])}
        )
        for row in rows
    }
    return [found[one.name] for one in COMBINATIONS if one.name in found]


def _store(result: Result) -> None:
    others = [one for one in _stored() if one.combination.name != result.combination.name]
    rows = [asdict(one) for one in [*others, result]]
    (BUILD / "results.json").write_text(json.dumps(rows, indent=1) + "\n", "utf-8")
    (BUILD / "results.md").write_text(table(_stored()), "utf-8")


def _verdict(result: Result) -> str:
    if result.missing:
        return f"{NOT_RUN}: {result.missing}"
    if result.is_good:
        return f"{result.passed} passed"
    return f"{result.passed} passed, {len(result.failed)} failed: {', '.join(result.failed)}"


def table(results: Sequence[Result]) -> str:
    """One row for each combination, also for those that were not run."""
    found = {result.combination.name: result for result in results}
    lines = ["| Python | torch | Ray | tests | run on |", "|---|---|---|---|---|"]
    for one in COMBINATIONS:
        said = (_verdict(found[one.name]), found[one.name].day) if one.name in found else (NOT_RUN, "")
        lines.append("| " + " | ".join((one.python, one.torch, one.ray, *said)) + " |")
    return "\n".join(lines) + "\n"


def page(text: str, results: Sequence[Result]) -> str:
    """The page with the table of these results between its two marks."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{table(results)}{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    sys.exit(main())
