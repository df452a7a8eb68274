"""On a real cluster: the weights of a mixture change while a job trains and while it is paused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kit.worlds import plain_reference
from shoal_api.client import ApiError, Client
from shoal_workers.contract.job import JobState
from shoal_workers.contract.language_model import LM_TASK

STEPS = 200


@pytest.fixture
def spec(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "web.txt").write_text("".join(f"{n} green bottles hanging on the wall\n" for n in range(400)))
    chats = [{"text": f"what is {n} times {n}? it is {n * n}."} for n in range(200)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    sources = [
        {"path": str(tmp_path / "web.txt"), "name": "web", "weight": 3},
        {"path": str(tmp_path / "chats.jsonl"), "name": "chats", "weight": 1},
    ]
    return {
        "task": LM_TASK,
        "model": {"dim": 16, "num_layers": 1, "num_heads": 2, "seq_len": 16},
        "data": {"sources": sources, "cache_dir": str(tmp_path / "cache"), "validation_fraction": 0},
        "batch": {"global_size": 8, "micro_size": 2},
        "schedule": {"warmup_steps": 2},
        "stop": {"steps": STEPS},
        "validation": {"samples": 0},
        "seed": 3,
    }


def test_workers_follow_a_request_for_other_weights_from_its_step_on(
    submit: Any, client: Client, spec: dict[str, Any]
) -> None:
    run = submit(workers=2, code={}, **spec)
    run.wait_for_step(1)
    with pytest.raises(ApiError, match="learn in time of what changes from step"):
        client.change_weights(run.id, {"web": 0, "chats": 1}, at_step=1)
    client.change_weights(run.id, {"web": 0, "chats": 1}, at_step=10**6)  # after the end: only the group learns of it
    settings = run.wait_for_event("generation.settings").data
    assert settings["changes"] == ["data.weights from step 1000000 on none -> web 0, chats 1"]
    client.pause(run.id)
    done = run.wait_for(JobState.PAUSED).status.step

    view = client.change_weights(run.id, {"web": 0.1, "chats": 0.9})
    [change] = view.spec.data["changes"]
    assert change == {"at_step": done + 1, "weights": {"web": 0.1, "chats": 0.9}}
    assert settings["step"] < done < STEPS
    client.resume(run.id)
    job = run.finish()
    assert job.status.attempt == 2 and job.status.steps_lost == 0
    expected = {**spec, "data": view.spec.data, "optimizer": {"lr": 0.01}}
    reference = plain_reference.losses(expected, STEPS)
    losses = run.losses()
    assert losses == pytest.approx({step: reference[step][0] for step in losses}, abs=1e-5) and len(losses) == STEPS
