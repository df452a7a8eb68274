"""A job with MLflow's hook: rank 0 is killed, and each step is in the file store once, in one finished run."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal_api.client import Client


@pytest.mark.matrix
def test_each_step_is_in_mlflow_once_although_rank_0_is_killed(submit, client: Client, tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    run = submit(
        steps=12,
        strikes=[{"at": "step", "rank": 0, "n": 7, "do": "kill"}],
        metrics={"hook": "shoal_workers.metrics_hook:mlflow"},
        code_more={"env": {"MLFLOW_TRACKING_URI": f"file://{tmp_path}", "MLFLOW_ALLOW_FILE_STORE": "true"}},
    )
    run.finish()
    assert len(client.incidents(run.id)) == 1 and run.events("metrics.hook_failed") == []
    [metrics] = tmp_path.glob("*/*/metrics")
    logged = [
        (int(step), float(value)) for _, value, step, *_ in map(str.split, (metrics / "loss").read_text().splitlines())
    ]
    assert logged == list(run.losses().items()), "the same values as the service has, each once, in order"
    assert "status: 3" in (metrics.parent / "meta.yaml").read_text(), "FINISHED"
    assert (metrics.parent / "tags" / "shoal.job_id").read_text() == run.id
