"""docs/reference/spec.md is what tools/docs_pages.py makes of the code as it is."""

from pathlib import Path
from types import ModuleType

from shoal_workers.contract.language_model import LanguageModelConfig
from shoal_workers.contract.spec import JobSpec
from shoal_workers.contract.text_data import TextDataConfig

DOCS = Path(__file__).resolve().parents[3] / "docs"


def test_the_committed_page_is_up_to_date(generate: ModuleType) -> None:
    assert (DOCS / "reference" / "spec.md").read_text(encoding="utf-8") == generate.spec_page(), "run `make docs`"


def test_every_key_has_a_row_with_a_meaning(generate: ModuleType) -> None:
    rows = [line for line in generate.spec_page().splitlines() if line.startswith(("| `", "| [`"))]
    text = "\n".join(rows)
    keys = {*JobSpec.model_fields, "batch.global_size", "parallelism.dp_shard", "retry.max_failures"}
    keys |= {f"model.{key}" for key in LanguageModelConfig.model_fields}
    keys |= {f"data.{key}" for key in TextDataConfig.model_fields}
    assert [key for key in sorted(keys) if f"`{key}`" not in text] == []
    assert [row for row in rows if row.rstrip("| ").count(" | ") < 3] == []
