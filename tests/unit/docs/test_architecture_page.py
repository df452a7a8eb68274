"""The generated parts of docs/architecture.md and docs/elastic.md are up to date; decision records name their tests."""

from pathlib import Path
from types import ModuleType

from kit.cases import failed_cases
from shoal_service.core.attempt.state.stages import TRANSITIONS, Stage

DOCS = Path(__file__).resolve().parents[3] / "docs"
PAGE = (DOCS / "architecture.md").read_text(encoding="utf-8")


def test_the_committed_diagram_is_up_to_date(generate: ModuleType) -> None:
    assert generate.with_stage_diagram(PAGE) == PAGE, "run `make docs`"


def test_the_committed_table_of_faults_is_up_to_date(generate: ModuleType) -> None:
    page = (DOCS / "elastic.md").read_text(encoding="utf-8")
    assert generate.with_fault_table(page) == page, "run `make docs`"


def test_the_diagram_shows_every_transition_but_the_ends() -> None:
    for stage, followers in TRANSITIONS.items():
        for after in followers - {Stage.ENDED}:
            assert f"    {stage} --> {after}\n" in PAGE


def test_every_waiting_stage_has_a_row_with_its_deadline() -> None:
    rows = {line.split("|")[1].strip() for line in PAGE.splitlines() if line.startswith("| ")}
    assert {str(stage) for stage in Stage} - {"ended"} <= rows


def test_a_decision_names_the_check_that_enforces_it() -> None:
    def check(page: Path) -> None:
        section = page.read_text("utf-8").split("## Enforced by")[1]
        names = [word.strip("`.,;:()") for word in section.split() if word.startswith("`tests/")]
        assert names, "no test is named"
        assert [name for name in names if not (DOCS.parent / name.split("::")[0]).exists()] == []

    decisions = sorted((DOCS / "decisions").glob("0*.md"))
    assert len(decisions) > 30 and failed_cases(check, decisions, lambda page: page.name) == {}
