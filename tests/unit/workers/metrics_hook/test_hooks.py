"""The hook of docs/metrics-hook.md, W&B's hook against a double of wandb, and what keeps a step from being repeated."""

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from shoal_workers.contract.messages import HookJob, MetricPoint
from shoal_workers.contract.spec import JobSpec, MetricsSpec
from shoal_workers.metrics_hook.process import job_of
from shoal_workers.metrics_hook.program import NewValues, load_hook

PAGE = Path(__file__).resolve().parents[4] / "docs" / "metrics-hook.md"
JOB = HookJob(id="job-1", name="digits", project="vision", user="ada", labels={"lr": "3e-4"}, settings={"seed": 1})


class FakeRun:
    """The calls of a run of wandb that the hook makes. A summary has the last value of each metric."""

    def __init__(self) -> None:
        self.summary: dict[str, Any] = {}
        self.logged: list[dict[str, Any]] = []
        self.exit_code: int | None = None

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        pass

    def log(self, values: dict[str, Any]) -> None:
        self.logged.append(values)
        self.summary.update(values)

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


def test_wandb_gets_one_run_with_the_jobs_id_and_says_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    run, settings = FakeRun(), {}

    def init(**given: Any) -> FakeRun:
        settings.update(given)
        return run

    wandb = ModuleType("wandb")
    monkeypatch.setattr(wandb, "init", init, raising=False)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    hook = load_hook("shoal_workers.metrics_hook:wandb")
    assert hook.start(JOB) == {}
    assert (settings["id"], settings["resume"], settings["project"]) == ("job-1", "allow", "vision")
    hook.log(1, {"loss": 2.0}, 0.0)
    hook.log(2, {"loss": 1.0}, 0.0)
    hook.log(1, {"val_loss": 3.0}, 0.0)
    again = load_hook("shoal_workers.metrics_hook:wandb")
    reached = dict(again.start(JOB) or {})
    assert (reached["loss"], reached["val_loss"]) == (1, 1), "of both axes, never more than what was logged last"
    again.end("failed")
    assert run.exit_code == 1


def test_the_hook_of_the_page_goes_on_where_its_file_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METRICS_FILE", str(tmp_path / "metrics"))
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    hook = names["ToFile"]()
    assert hook.start(JOB) == {}
    hook.log(3, {"loss": 1.0}, 0.0)
    hook.log(4, {"loss": 1.0, "val_loss": 2.0}, 0.0)
    hook.end("paused")
    assert names["ToFile"]().start(JOB) == {"loss": 4, "val_loss": 4}


def test_a_value_is_new_if_its_metric_has_not_reached_the_step() -> None:
    new = NewValues({"loss": 4})

    def of(step: int, **values: float) -> dict[str, float]:
        return new.of(MetricPoint(seq=1, step=step, at=0.0, values=values))

    assert of(4, loss=1.0) == {}
    assert of(4, loss=1.0, val_loss=2.0) == {"val_loss": 2.0}
    assert of(5, loss=1.0, val_loss=2.0) == {"loss": 1.0, "val_loss": 2.0}
    assert of(5, loss=1.0) == {} and of(3, loss=1.0) == {}


def test_a_hook_gets_the_spec_without_what_names_secrets() -> None:
    spec = JobSpec.model_validate(
        {
            "task": "m:T",
            "stop": {"steps": 3},
            "secrets": {"KEY": {"env": "NODE_KEY"}},
            "webhooks": [{"url": "https://example.org/t0ken", "secret": "file:ops"}],
        }
    )
    settings = job_of("job-1", spec).settings
    assert settings["task"] == "m:T" and not {"secrets", "webhooks"} & settings.keys()


def test_a_hook_that_is_no_path_is_refused() -> None:
    with pytest.raises(ValueError, match=r'metrics\.hook .* must have the form "module:Name"'):
        MetricsSpec(hook="mlflow")
