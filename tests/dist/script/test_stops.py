"""A script is ended on order: SIGTERM, the grace in which it may save, SIGKILL; then its group starts again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kit.processes.script_bench import Events, ScriptBench
from shoal_workers.contract.messages import ExitKind, Phase
from shoal_workers.contract.worker_reports import GroupFormed
from shoal_workers.engine.group.rendezvous import Rendezvous, StoreConnections
from shoal_workers.script.environment import Place

Bench = Callable[..., ScriptBench]

_WAITS = "import events; events.say(ready=True); events.wait()"
_SAVES = """
import events, os, signal, sys
from pathlib import Path

def save(*_):
    Path(os.environ["SHOAL_CHECKPOINT_DIR"], "saved").write_text("yes")
    events.say(saved=True)
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
events.say(ready=True)
while True:
    signal.pause()
"""
_IGNORES = """
import events, signal, subprocess, sys
signal.signal(signal.SIGTERM, lambda *_: events.say(ignored=True))
events.say(ready=True)
while True:
    signal.pause()
"""


def test_a_script_without_a_handler_ends_at_once(bench: Bench, events: Events) -> None:
    runners = bench(_WAITS, script={"grace_s": 600})
    runners.start()
    events.next(ready=True)
    [end] = runners.interrupt()
    assert (end.kind, end.error, end.step) == (ExitKind.INTERRUPTED, None, 0)


def test_a_script_that_saves_on_sigterm_is_let_finish(bench: Bench, events: Events) -> None:
    runners = bench(_SAVES, script={"grace_s": 600})
    runners.start()
    events.next(ready=True)
    [end] = runners.interrupt()
    assert end.kind is ExitKind.INTERRUPTED
    assert (runners.checkpoints / "saved").read_text() == "yes"


def test_a_script_that_does_not_end_within_its_grace_is_killed(bench: Bench, events: Events) -> None:
    runners = bench(_IGNORES, script={"grace_s": 0.5})
    runners.start()
    events.next(ready=True)
    began = time.monotonic()
    [end] = runners.interrupt()
    assert end.kind is ExitKind.INTERRUPTED
    assert time.monotonic() - began >= 0.5
    events.next(ignored=True)
    assert runners.said() == ["train.py did not end within 0.5 s of SIGTERM (script.grace_s), and was killed"]


@pytest.mark.parametrize("text", [_SAVES, _WAITS])
def test_a_yield_ends_the_script_whatever_its_status(bench: Bench, events: Events, text: str) -> None:
    runners = bench(text, script={"grace_s": 600})
    runners.start()
    events.next(ready=True)
    [end] = runners.request_yield()
    assert (end.kind, end.is_durable, end.error) == (ExitKind.YIELDED, False, None)


def test_an_interrupt_during_the_grace_of_a_yield_counts(bench: Bench, events: Events) -> None:
    runners = bench(_IGNORES, script={"grace_s": 2})
    runners.start()
    events.next(ready=True)
    runners.on_all(lambda runner: runner.request_yield(1))
    events.next(ignored=True)
    [end] = runners.interrupt()
    assert end.kind is ExitKind.INTERRUPTED


def test_a_generation_that_was_interrupted_before_it_began_is_stale(bench: Bench) -> None:
    runners = bench(_WAITS)
    runners.runners[0].interrupt(1)
    [end] = runners.run()
    assert end.kind is ExitKind.STALE


def test_an_interrupt_of_an_older_generation_does_nothing(bench: Bench, events: Events) -> None:
    runners = bench(_WAITS)
    runners.start()
    events.next(ready=True)
    assert not runners.runners[0].interrupt(0)
    assert runners.runners[0].progress.phase is Phase.SCRIPT
    assert runners.runners[0].interrupt(1)


def test_a_rank_that_waits_for_the_others_is_interrupted(bench: Bench) -> None:
    runners = bench(_WAITS)
    runners.start_alone(world_size=2)
    while runners.runners[0].progress.phase is not Phase.FORMING:
        threading.Event().wait(0.01)
    assert runners.interrupt()[0].kind is ExitKind.INTERRUPTED


def test_a_group_whose_rank_is_missing_does_not_form(bench: Bench) -> None:
    runners = bench(_WAITS)
    runners.start_alone(world_size=2, store_timeout_s=0.5)
    [end] = runners.exits()
    assert end.kind is ExitKind.FORM_FAILED and end.error is not None
    assert end.error.message == "1 of 2 ranks did not arrive (places) within 0.5 s: rank 1."


def test_a_script_that_began_in_a_group_that_does_not_form_is_ended(bench: Bench, events: Events) -> None:
    runners = bench(_WAITS)
    runners.start_alone(world_size=2, store_timeout_s=1.0)
    connections = StoreConnections("key")
    other = Rendezvous(runners.assignment(1, 2), connections, lambda: None)
    other.connect()
    other.gather(
        "places", Place(node_id="node", devices="").model_dump_json()
    )  # and never says that its script has started
    pid = events.next(ready=True)["pid"]
    [end] = runners.exits()
    other.close()
    connections.close()
    assert end.kind is ExitKind.FORM_FAILED and end.error is not None
    assert end.error.message == "1 of 2 ranks did not arrive (started) within 1 s: rank 1."
    assert not Path(f"/proc/{pid}").exists()


def test_a_checkpoint_directory_that_cannot_be_made_is_a_failure_of_the_storage(bench: Bench) -> None:
    runners = bench(_WAITS)
    runners.checkpoints.touch()
    [end] = runners.run()
    assert end.kind is ExitKind.STORAGE_FAILED and end.error is not None
    assert end.error.message.startswith(f"the job's checkpoint directory {runners.checkpoints} cannot be made")


def test_the_group_starts_again_with_another_world_size_in_the_same_workers(bench: Bench, events: Events) -> None:
    text = """
import events, os
events.say(**{name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")})
events.wait()
"""
    runners = bench(text, 2)
    seen = []
    for restarts, world_size in enumerate((2, 1, 2)):
        runners.start(world_size)
        seen.append(events.next(RANK="0", WORLD_SIZE=str(world_size), TORCHELASTIC_RESTART_COUNT=str(restarts))["pid"])
        assert {end.kind for end in runners.interrupt()} == {ExitKind.INTERRUPTED}
    assert len(set(seen)) == 3, "each generation has processes of its own"
    formed = runners.reports(GroupFormed)
    assert [one.generation for one in formed] == [1, 2, 3]
    assert {(one.start_step, one.total_steps, one.num_parameters) for one in formed} == {(None, None, 0)}
