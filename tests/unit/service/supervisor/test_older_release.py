"""After an upgrade: the journal of a supervisor and its workers are those of an older release."""

import json
from pathlib import Path
from typing import Any

import pytest

from doubles.event_loop import until
from doubles.supervisor_bench import SupervisorBench
from shoal_service.supervisor.journal import JournalEntry, NewerJournal, parse_entry
from shoal_workers.contract.base import WIRE_VERSION
from shoal_workers.contract.job import EndReason

GOLDEN = Path(__file__).resolve().parents[3] / "golden" / f"wire-{WIRE_VERSION}"
OLDER = WIRE_VERSION - 1


def journal(stage: str, **changes: Any) -> str:
    document: dict[str, Any] = json.loads((GOLDEN / f"journal_{stage}.json").read_text("utf-8"))
    return json.dumps(document["json"] | changes)


def older_journal(stage: str) -> str:
    entry = json.loads(journal(stage, version=OLDER))
    for worker in entry["state"]["pool"]["workers"]:
        if worker["info"] is not None:
            worker["info"]["version"] = OLDER
    return json.dumps(entry)


@pytest.mark.parametrize("stage", ["opening", "starting", "forming", "running", "quiescing", "re_forming"])
async def test_a_restarted_supervisor_goes_on_from_the_journal_of_the_release_before(stage: str) -> None:
    """Its workers speak the older version: they are replaced, and the attempt finishes."""

    bench = SupervisorBench()
    entry = older_journal(stage)
    for known in json.loads(entry)["state"]["pool"]["workers"]:
        old = bench.workers.create(known["worker_id"], node_id=f"n{known['index']}")
        old.info = old.info.model_copy(update={"version": OLDER})
    olds = list(bench.workers.by_name.values())
    bench.storage.entries = {1: entry}
    bench.storage.starts = [900.0]
    bench._open()
    bench.start()
    bench.direct(granted=2)
    await bench.advance_until(lambda: len(bench.workers.group) == 2, limit_s=120.0)
    assert {worker.assignment.life for worker in bench.workers.group if worker.assignment} == {2}
    assert all(worker not in olds for worker in bench.workers.group)
    assert not any(old.is_alive for old in olds), "none is left over"
    bench.workers.total_steps = 12
    bench.workers.form()
    bench.workers.train(12)
    await until(lambda: bench.status.step == 12)
    bench.workers.finish()
    assert (await bench.end()).reason is EndReason.FINISHED


def test_a_journal_of_a_newer_release_is_refused_with_the_way_out() -> None:
    with pytest.raises(NewerJournal, match="Install the same release on every node"):
        parse_entry(journal("running", version=WIRE_VERSION + 1, something="new"))
    assert isinstance(parse_entry(journal("running")), JournalEntry)
