"""The Makefile runs every benchmark, and its help names every target."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
_STARTED_BY_OTHERS = {
    "http_edge.py",
    "played_service.py",
    "plain_loop.py",
    "torchrun_worker.py",
    "ray_train_driver.py",
    "ray_attempt.py",
    "torchft_agent.py",
    "torchft_worker.py",
    "script.py",
    "ray_train.py",
    "trainer.py",
    "reader.py",
}
"""Programs that a benchmark starts."""
_SEPARATE = {"bench/soak/main.py", "bench/culprit/main.py"}
"""`make soak`: a test of half an hour, not a benchmark. `make bench-culprit`: twenty minutes, and needs root."""


def _recipes() -> dict[str, str]:
    """Target -> its prerequisites and commands."""
    found = re.findall(r"^([a-z-]+):([^#\n]*)(?:##[^\n]*)?\n((?:\t[^\n]*\n)*)", MAKEFILE, re.M)
    return {target: f"{needs}\n{commands}" for target, needs, commands in found}


def test_make_bench_runs_every_benchmark() -> None:
    recipes = _recipes()
    targets = [name for name in recipes["bench"].split() if name.startswith("bench-")]
    run = recipes["bench"] + "".join(recipes[name] for name in targets)
    scripts = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "bench").rglob("*.py")
        if '__name__ == "__main__"' in path.read_text(encoding="utf-8") and path.name not in _STARTED_BY_OTHERS
    }
    parts = {"bench/planner.py"} if "planner" in run else set()  # a part of bench/layouts/main.py
    assert {script for script in scripts - _SEPARATE - parts if script not in run} == set()


def test_every_target_is_phony_and_has_a_line_of_help() -> None:
    phony = set(re.findall(r"^\.PHONY:(.*)$", MAKEFILE, re.M)[0].split())
    helped = set(re.findall(r"^([a-z-]+):.*##", MAKEFILE, re.M))
    assert phony == helped == set(_recipes())
