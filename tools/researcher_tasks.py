"""Does the tasks of a researcher (tests/kit/researcher) in Chromium, and writes what each takes into
docs/researcher-tasks.md.

    python tools/researcher_tasks.py [NAME ...]

With names of tasks, only those are done and printed, and nothing is written. Needs chromium and its driver.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))

from kit.processes.chromium import chromium  # noqa: E402
from kit.researcher.running import HEAD, TASKS, make_history, perform, rows, served_history  # noqa: E402

PAGE = ROOT / "docs" / "researcher-tasks.md"
_TABLE = re.compile(re.escape(HEAD) + r"(?:\|.*\n)*")


def main() -> None:
    names = sys.argv[1:]
    if unknown := set(names) - {one.name for one in TASKS}:
        raise SystemExit(
            f"There is no task {', '.join(sorted(unknown))}; there are {', '.join(one.name for one in TASKS)}."
        )
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if browser is None or driver is None:
        raise SystemExit("chromium and chromedriver are not installed: the tasks were not done.")
    taken = []
    with tempfile.TemporaryDirectory(prefix="shoal-tasks-") as folder, chromium(browser, driver) as tab:
        history = make_history(Path(folder, "history"))
        for task in TASKS:
            if not names or task.name in names:
                with served_history(history, Path(folder, task.name)) as service:
                    taken.append((task, perform(task, tab, service, Path(folder, task.name, "downloads"))))
                print(task.name, taken[-1][1], flush=True)
    if not names:
        page = PAGE.read_text(encoding="utf-8")
        assert _TABLE.search(page), f"{PAGE} has no table with the head {HEAD!r}"
        PAGE.write_text(_TABLE.sub(lambda _: rows(taken), page), encoding="utf-8")


if __name__ == "__main__":
    main()
