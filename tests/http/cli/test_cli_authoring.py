"""Commands that write specs: each template is accepted by a server as it is, and a dry run stores nothing."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from shoal_api.cli.commands.specs import templates
from shoal_service.fleet_views import StartForecast
from shoal_service.store import archives

LLAMA = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 257,
    "max_position_embeddings": 256,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """What `save_pretrained` leaves, as far as a submission looks at it."""
    directory = tmp_path / "llama"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(LLAMA))
    (directory / "tokenizer.json").write_text("{}")
    return directory


@pytest.mark.parametrize("template", sorted({*templates()} - {"script", "ray-train"}))
def test_a_template_is_accepted_as_it_is(shoal: Any, service: Any, template: str, tmp_path: Path, model: Path) -> None:
    job = tmp_path / "mine"
    options = ["--model", str(model)] if template == "fine-tune" else []
    written = shoal("init", template, str(job), *options)
    assert written.code == 0 and "--dry-run" in written.out
    tried = shoal("submit", str(job / "job.yaml"), "--dry-run", "--json").json()
    assert (tried["spec"]["name"], tried["note"]) == (template, ""), "nothing about it is remarked"
    assert [one["workers"] for one in tried["layouts"]] == [1, 4]
    assert shoal("jobs", "--json").json() == []


@pytest.mark.parametrize(("template", "launcher"), [("script", "torchrun"), ("ray-train", "ray_train")])
def test_the_script_of_a_template_is_that_of_the_examples_and_is_accepted_as_it_is(
    shoal: Any, service: Any, template: str, launcher: str, tmp_path: Path
) -> None:
    written = shoal("init", template, str(tmp_path / "mine"))
    path = tmp_path / "mine" / "train.py"
    assert written.code == 0 and f"shoal submit {path} --workers 1:4 --dry-run" in written.out
    assert path.read_text() == (Path(__file__).parents[3] / "examples" / template / "train.py").read_text()
    tried = shoal("submit", str(path), "--workers", "1:4", "--dry-run", "--json").json()
    assert tried["spec"]["script"]["file"] == "train.py" and tried["note"] == ""
    checked = shoal("check", str(path), "--json").json()
    assert tried["spec"]["script"]["launcher"] == launcher == checked["launcher"]
    assert (checked["door"], checked["obstacles"]) == ("script", [])
    assert not [
        one for one in checked["notes"] if "not reported" in one["words"] or "lost with its node" in one["words"]
    ]


def test_templates_are_listed_and_replace_no_file(shoal: Any, tmp_path: Path) -> None:
    assert all(name in shoal("init").out for name in templates())
    (tmp_path / "job.yaml").write_text("mine")
    refused = shoal("init", "own-task", str(tmp_path))
    assert refused.code == 2 and "exists already" in refused.err
    assert sorted(path.name for path in tmp_path.glob("*.[py]*")) == ["job.yaml"]
    assert (tmp_path / "job.yaml").read_text() == "mine"
    assert "language-model" in shoal("init", "lm").err
    assert "--model is for the template fine-tune" in shoal("init", "own-task", "--model", str(tmp_path)).err


def test_a_dry_run_stores_neither_job_nor_code(shoal: Any, service: Any, tmp_path: Path) -> None:
    shoal("init", "own-task", str(tmp_path / "mine"))
    ran = shoal("submit", str(tmp_path / "mine" / "job.yaml"), "--dry-run", "--json").json()
    sha256 = ran["spec"]["code"]["archive"]
    assert len(sha256) == 64 and not service.store.reading(archives.exists)(sha256)
    assert shoal("jobs", "--json").json() == []
    spec = json.dumps({**ran["spec"], "code": {"archive": sha256}})
    refused = shoal("submit", "-", "--dry-run", stdin=spec)
    assert refused.code != 0 and "is not stored here" in refused.err, "an archive that nobody will upload"


def test_a_dry_run_says_when_the_job_would_start(shoal: Any, service: Any, spec_file: Path) -> None:
    assert "does not schedule" in shoal("submit", str(spec_file), "--dry-run").out
    service.cluster.start = StartForecast(workers=4, reason="Starting with 4 workers (1 CPU each).")
    assert "at once. Starting with 4 workers" in shoal("submit", str(spec_file), "--dry-run").out
    service.cluster.start = StartForecast(position=3, reason="Needs 2 workers.", expected_at=time.time() + 100)
    text = shoal("submit", str(spec_file), "--dry-run").out
    assert "number 3 in the queue; expected start: in" in text and "Needs 2 workers." in text
