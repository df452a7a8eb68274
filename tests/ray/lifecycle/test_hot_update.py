"""On a real cluster: a running job gets new code three times: another model, a mistake, and the same maths."""

from __future__ import annotations

from pathlib import Path

from kit.worlds.tiny_jobs import TASKS, holds
from shoal_api.client import Client

TINY = (TASKS / "tiny.py").read_text("utf-8")


def new_code(directory: Path, old: str, new: str) -> Path:
    """The task with one change."""
    assert TINY.count(old) == 1
    directory.mkdir()
    (directory / "tiny.py").write_text(TINY.replace(old, new), "utf-8")
    return directory


def test_new_code_is_refused_rolled_back_or_trains_and_every_loss_is_that_of_the_undisturbed_run(
    submit, client: Client, tmp_path: Path
) -> None:
    other_model = new_code(tmp_path / "a", "nn.Linear(21, 3))", "nn.Linear(21, 3), nn.Linear(3, 3))")
    raises = new_code(
        tmp_path / "b", "        x, y = batch\n", "        x, y = batch\n        assert now[1] < 9, 'new mistake'\n"
    )
    same = new_code(
        tmp_path / "c", "        x, y = batch\n", "        print('new code', now[1])\n        x, y = batch\n"
    )
    run = submit(workers=2, min_workers=2, steps=40, step_s=0.06, strikes=holds(4, 7, 12))

    run.wait_at("step-4-0")
    old = run.now().spec.code.archive
    pids = run.pids()
    client.update_code(run.id, other_model)
    refused = run.wait_for_event("code.refused")
    assert "4.weight (float32 [3, 3]) is new" in refused.data["reason"] and refused.data["before"] == old
    run.release("step-4-0")

    run.wait_at("step-7-0")
    assert run.pids() == pids and run.now().spec.code.archive == old
    client.update_code(run.id, raises)
    run.wait_for_event("generation.switching")
    run.release("step-7-0")
    back = run.wait_for_event("code.rolled_back")
    assert back.data["step"] in (7, 8), "the order to yield may reach the ranks after the vote of the step"
    assert back.data["before"] == old and "new mistake" in back.data["reason"]

    run.wait_at("step-12-0")
    assert run.pids() == pids, "the workers with the code before have waited"
    client.update_code(run.id, same)
    run.wait_for_event("generation.switching", 2)
    run.release("step-12-0")
    updated = run.wait_for_event("code.updated")
    assert updated.data["step"] in (12, 13) and not set(run.pids().values()) & set(pids.values())

    job = run.finish()
    assert (job.status.step, job.status.steps_lost, job.status.attempt) == (40, 0, 1)
    assert job.spec.code.archive == updated.data["version"] and job.status.code.version == updated.data["version"][:12]
    assert f"new code {updated.data['step'] + 1}" in {line.text for line in client.logs(run.id)}
    reference = run.reference()
    assert run.losses() == {step: reference[step] for step in range(1, 41)}
