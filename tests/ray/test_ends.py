"""How programs end by themselves on a real cluster, and whose modules they import."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kit.processes.server import PATIENCE_S
from kit.worlds import program_ends
from shoal_api.client import Client
from shoal_workers.contract.job import EndReason, JobState

_ALONE = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 1:
    raise SystemExit(0)
dist.all_reduce(torch.ones(1))
"""
_SCRIPT = """
import secrets, resource, yaml
assert (secrets.KEY, resource.KEY, yaml.KEY) == ("secrets", "resource", "yaml")
"""
_LOOP = """
import secrets, torch, mine, shoal

def train(run):
    assert secrets.token_hex and mine.KEY == "mine"
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for batch in run.batches(torch.utils.data.TensorDataset(torch.ones(4, 1)), global_size=2):
        run.backward(model(batch[0]).sum())
        run.steps(optimizer)
        if run.step == 1:
            return

shoal.run(train)
"""


def _submit(
    client: Client, folder: Path, text: str, kind: str, workers: int = 1, program: dict[str, str] | None = None
) -> str:
    folder.mkdir()
    (folder / "train.py").write_text(text)
    for name in ("secrets", "resource", "yaml", "mine") if workers == 1 else ():
        (folder / f"{name}.py").write_text(f"KEY = {name!r}\n")
    document: dict[str, Any] = {
        kind: program or {"file": "train.py"},
        "code": {"working_dir": str(folder)},
        "elasticity": {"min_workers": workers, "max_workers": workers},
    }
    return client.submit(document).id


def test_programs_end_as_they_say_and_import_their_own_modules(client: Client, tmp_path: Path) -> None:
    """All jobs are submitted together, since most of their time is the start."""
    ids = [
        _submit(client, tmp_path / "script", _SCRIPT, "script"),
        _submit(client, tmp_path / "loop", _LOOP, "loop"),
        _submit(client, tmp_path / "alone", _ALONE, "script", workers=2),
        _submit(client, tmp_path / "module", "", "script", program={"module": "no_such_module"}),
    ]
    script, loop, alone, module = [client.wait(job_id, timeout_s=PATIENCE_S).status for job_id in ids]
    assert (script.state, loop.state) == (JobState.SUCCEEDED, JobState.SUCCEEDED), (script.message, loop.message)
    said = [line.text for line in client.logs(ids[1]) if "cannot be imported" in line.text]
    assert said and said[0].startswith("resource, secrets, yaml of the job's code cannot be imported")

    assert (alone.state, alone.reason) == (JobState.FAILED, EndReason.USER_ERROR), alone.message
    assert alone.message.startswith(
        "rank 1 of train.py ended with status 0 while others still trained (rank 0 was at train.py:7), 3 times in a row"
    )
    assert alone.failure is not None and alone.failure.ranks == (1,) and alone.attempt == 1

    assert (module.state, module.reason) == (JobState.FAILED, EndReason.USER_ERROR), module.message
    assert "No module named 'no_such_module'" in module.message


def _wrong(client: Client, cells: list[tuple[str, str]]) -> list[str]:
    jobs = {program_ends.submit(client, door, end): (door, end) for door, end in cells}
    seen = program_ends.see(client, jobs)
    return [text for job_id, one in seen.items() if (text := program_ends.wrong(*jobs[job_id], one))]


@pytest.mark.matrix
def test_an_end_of_a_program_has_its_sentence_rank_and_line(client: Client) -> None:
    cells = [("script", "text"), ("script", "thread"), ("loop", "interrupt"), ("task", "memory")]
    assert _wrong(client, cells) == []


@pytest.mark.matrix
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("door", program_ends.DOORS)
def test_each_end_of_a_program_has_its_sentence_rank_and_line(client: Client, door: str) -> None:
    """All jobs are submitted together. `make bench-ends` makes the table of docs/measured/ends.md of them."""
    assert _wrong(client, [(door, end) for end in program_ends.ENDS]) == []
