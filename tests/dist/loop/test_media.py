"""Media of loops and tasks in real groups: they are stored beside the checkpoints, and a redone step replaces them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kit.worlds import plain_loop
from shoal_workers.contract.layout import fully_sharded, replicated
from shoal_workers.contract.media import FOLDER, MediaRecord, RecordName, counted
from shoal_workers.contract.messages import ExitKind

LOOPS = Path(__file__).parents[3] / "tests" / "kit" / "loops"


def spec_of(name: str) -> dict[str, Any]:
    return {
        "task": None,
        "loop": {"file": f"tests/kit/loops/{name}.py"},
        "elasticity": {"max_workers": plain_loop.MOST_WORKERS},
        "snapshot": {"budget": 1.0},
    }


def records(root: Path) -> list[MediaRecord]:
    names = [path.name for path in (root / FOLDER).iterdir()]
    return [MediaRecord.model_validate_json((root / FOLDER / str(one)).read_text()) for one in counted(names)]


def test_what_a_loop_logs_is_stored_beside_its_checkpoints(make_job: Any, tmp_path: Path) -> None:
    job = make_job(memory=True, **spec_of("shown"))
    workers = job.workers(2)
    ends = job.run(workers, layout=replicated(2))
    assert [e.kind for e in ends] == [ExitKind.FINISHED] * 2, ends
    plain, _ = plain_loop.undisturbed(LOOPS / "digits.py")
    assert job.losses(workers) == pytest.approx(plain, abs=3e-7), "what is logged changes nothing"
    found = records(tmp_path / "job")
    assert [(one.step, one.rank, one.generation) for one in found] == [(step, 0, 1) for step in (2, 4, 6, 8)]
    first = found[0]
    assert (first.images[0].width, first.images[0].height) == (6, 4)
    data = (tmp_path / "job" / FOLDER / first.images[0].file).read_bytes()
    assert data.startswith(b"\x89PNG") and len(data) == first.images[0].bytes
    assert sum(first.histograms[0].counts) == first.histograms[0].num_values == 32
    assert first.tables[0].columns == ("x", "class") and len(first.tables[0].rows) == 3
    assert first.texts[0].text == "step 2, world 2"


def test_a_step_that_is_redone_after_a_kill_replaces_what_it_has_logged(make_job: Any, tmp_path: Path) -> None:
    job = make_job(memory=True, **spec_of("shown"))
    workers = job.workers(3)
    victim, survivors = workers[1], [workers[0], workers[2]]
    victim.strike("backward", 5, "kill")  # in step 6, which rank 0 may have logged already
    job.start(workers, layout=replicated(3))
    assert victim.died()
    source = job.in_memory(job.interrupt(survivors), survivors)
    ends = job.run(survivors, layout=replicated(2), restore_snapshot=source)
    assert [e.kind for e in ends] == [ExitKind.FINISHED] * 2, ends
    found = records(tmp_path / "job")
    assert [one.step for one in found] == [2, 4, 6, 8]
    assert [one.texts[0].text.rpartition(" ")[2] for one in found] == ["3", "3", "2", "2"]
    there = [RecordName.parse(path.name) for path in (tmp_path / "job" / FOLDER).glob("*.json")]
    assert len([one for one in there if one is not None and one.step == 6]) == 1, "the older one is deleted"


def test_a_task_logs_with_the_package_shoal(make_job: Any, tmp_path: Path) -> None:
    job = make_job(task="logging_tasks:Logging", stop={"steps": 3}, media={"ranks": "all"})
    workers = job.workers(2)
    ends = job.run(workers, layout=fully_sharded(2))
    assert [e.kind for e in ends] == [ExitKind.FINISHED] * 2, ends
    found = records(tmp_path / "job")
    assert {(one.step, one.rank) for one in found} == {(step, rank) for step in (1, 2, 3) for rank in (0, 1)}
    assert {one.histograms[0].name for one in found} == {"logits"}
