"""Pages whose tables, diagrams and lines code can print show what the code has, and decisions name their tests."""

import re
from collections.abc import Callable
from pathlib import Path

import cli_page
import docs_pages
import programs_page
import runbook_page
import simulation_page
from kit.cases import failed_cases
from kit.reach import table
from kit.sources import ROOT
from kit.worlds.small_programs import REFUSED, TRAINED
from schedulers import POLICIES
from shoal_api.cli.main import PANELS
from shoal_api.cli.session import MEANINGS, ExitCode
from shoal_api.demo.show import KILL_AT_STEP, KILL_RANK
from shoal_service.core.access import Permission
from shoal_service.core.attempt.state.parts import TRANSITIONS, Stage
from shoal_service.core.events.catalogue import CATALOGUE
from shoal_service.core.goodput import Category
from shoal_service.settings import Settings
from shoal_service.telemetry.exposition import ALL
from shoal_workers.contract.language_model import LanguageModelConfig
from shoal_workers.contract.spec import JobSpec
from shoal_workers.contract.text_data import TextDataConfig

DOCS = ROOT / "docs"
GENERATED: dict[str, Callable[[str], str]] = {
    "architecture.md": docs_pages.with_stage_diagram,
    "elastic.md": docs_pages.with_fault_table,
    "programs.md": programs_page.with_programs,
    "reference/cli.md": cli_page.with_commands,
    "reference/events.md": lambda _: docs_pages.events_page(),
    "reference/metrics.md": lambda _: docs_pages.metrics_page(),
    "reference/spec.md": lambda _: docs_pages.spec_page(),
    "security.md": docs_pages.with_permissions,
}
"""Page -> what `make docs` makes of its text."""
_LINES = re.compile(r"<!-- lines of (\S+) -->\n```python\n(.*?)```", re.DOTALL)


def read(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def test_the_committed_pages_are_up_to_date() -> None:
    stale = [page for page, generate in GENERATED.items() if generate(read(page)) != read(page)]
    if runbook_page.PAGE.read_text(encoding="utf-8") != runbook_page.text():
        stale.append(runbook_page.PAGE.name)
    assert stale == [], "run `make docs`"


def test_every_name_has_its_row() -> None:
    rows = {
        "reference/cli.md": [f"\n#### {name}\n" for commands in PANELS.values() for name in commands],
        "reference/events.md": [f"| `{name}` |" for name in CATALOGUE],
        "reference/metrics.md": [f"| `{metric.name}` |" for metric in ALL],
        "reference/rest-api.md": [f"| `{category}` |" for category in Category],
        "security.md": [
            *(f"| `{permission}` |" for permission in Permission),
            *(f"`SHOAL_{name.upper()}`" for name in Settings.model_fields if name.startswith("limit_")),
            table(),  # what a hostile task is compared with
        ],
        "architecture.md": [
            *(f"\n| {stage} |" for stage in Stage if stage is not Stage.ENDED),
            *(f"    {stage} --> {after}\n" for stage in TRANSITIONS for after in TRANSITIONS[stage] - {Stage.ENDED}),
        ],
    }
    assert [(page, row) for page, expected in rows.items() for row in expected if row not in read(page)] == []
    assert sum(name.startswith("limit_") for name in Settings.model_fields) == 8


def test_every_key_of_a_spec_has_a_row_with_a_meaning() -> None:
    rows = [line for line in read("reference/spec.md").splitlines() if line.startswith(("| `", "| [`"))]
    text = "\n".join(rows)
    keys = {*JobSpec.model_fields, "batch.global_size", "parallelism.dp_shard", "retry.max_failures"}
    keys |= {f"model.{key}" for key in LanguageModelConfig.model_fields}
    keys |= {f"data.{key}" for key in TextDataConfig.model_fields}
    assert [key for key in sorted(keys) if f"`{key}`" not in text] == []
    assert [row for row in rows if row.rstrip("| ").count(" | ") < 3] == []


def test_exit_codes_have_meanings_and_the_demo_its_step_and_rank() -> None:
    assert set(MEANINGS) == set(ExitCode)
    kill = f"kills the worker of rank {KILL_RANK} with SIGKILL after the job has reported step {KILL_AT_STEP}"
    assert kill in read("reference/cli.md")
    assert f"killed after step {KILL_AT_STEP}" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_there_are_at_least_forty_programs_and_no_words_twice() -> None:
    rows = [*TRAINED, *REFUSED]
    assert len(TRAINED) >= 40 and len({row.words for row in rows}) == len(rows)


def test_the_simulated_table_has_every_policy_and_its_tool_replaces_nothing_else() -> None:
    page = read("scheduling.md")
    simulated = page.split("<!-- simulated:")[1].split("<!-- end -->")[0].splitlines()
    assert [line.split()[0] for line in simulated[4:-1]] == list(POLICIES), "run `make docs`"
    before, after = simulation_page.with_table(page, "TABLE").split("TABLE")
    assert page.startswith(before) and page.endswith(after)


def test_lines_of_a_script_that_a_page_shows_are_in_it_in_their_order() -> None:
    blocks = _LINES.findall(read("porting.md"))
    assert [Path(file).parent.name for file, _ in blocks] == ["fsdp", "ray-train"]
    for file, block in blocks:
        rest = iter([line.strip() for line in (ROOT / file).read_text("utf-8").splitlines()])
        missing = [line for line in block.splitlines() if line.strip() not in ("", "...") and line.strip() not in rest]
        assert missing == [], file


def test_a_decision_names_the_check_that_enforces_it() -> None:
    def check(page: Path) -> None:
        section = page.read_text("utf-8").split("## Enforced by")[1]
        names = [word.strip("`.,;:()") for word in section.split() if word.startswith("`tests/")]
        assert names, "no test is named"
        assert [name for name in names if not (ROOT / name.split("::")[0]).exists()] == []

    decisions = sorted((DOCS / "decisions").glob("0*.md"))
    assert len(decisions) > 30 and failed_cases(check, decisions, lambda page: page.name) == {}
