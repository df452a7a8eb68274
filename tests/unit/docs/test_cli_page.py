"""docs/reference/cli.md lists every command as `shoal` has it."""

import runpy
from pathlib import Path

from shoal_api.cli.exit_codes import MEANINGS, ExitCode
from shoal_api.cli.main import PANELS
from shoal_api.demo.spec import KILL_AT_STEP, KILL_RANK

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")


def test_the_committed_page_is_up_to_date() -> None:
    assert runpy.run_path(str(ROOT / "tools" / "cli_page.py"))["with_commands"](PAGE) == PAGE, "run `make docs`"


def test_every_command_has_a_section() -> None:
    assert all(f"\n#### {name}\n" in PAGE for commands in PANELS.values() for name in commands)


def test_every_exit_code_has_a_meaning() -> None:
    assert set(MEANINGS) == set(ExitCode)


def test_the_pages_name_the_step_and_the_rank_of_the_kill() -> None:
    assert f"kills the worker of rank {KILL_RANK} with SIGKILL after the job has reported step {KILL_AT_STEP}" in PAGE
    assert f"killed after step {KILL_AT_STEP}" in (ROOT / "README.md").read_text(encoding="utf-8")
