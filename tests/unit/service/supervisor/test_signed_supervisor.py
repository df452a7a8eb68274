"""A supervisor whose attempt has a key: what it obeys, what it refuses, and the event about it."""

from __future__ import annotations

from typing import Any

import pytest

from doubles.fake_catalog import FakeCatalog
from doubles.fake_clock import FakeClock
from doubles.fake_fleet import FakeFleet
from doubles.fake_journal import FakeJournal, JournalStorage
from doubles.fake_nodes import FakeHostWatch, FakeNodeWatch, FakeProbe
from doubles.fake_workers import FakeWorkers
from kit.contracts.journal import CONFIG, entry
from shoal_service.core.desired import Desired
from shoal_service.signing.calls import CallName, CallRefused, Refusal, SignedCall
from shoal_service.signing.signer import Signer
from shoal_service.supervisor.config import Directive, StaleEpoch
from shoal_service.supervisor.protocols import World
from shoal_service.supervisor.supervisor import Supervisor

SEED = "22" * 32


def signer(epoch: int, *, seed: str = SEED, job_id: str = CONFIG.job_id) -> Signer:
    return Signer(seed, job_id, CONFIG.attempt, epoch)


def opened(storage: JournalStorage) -> Supervisor:
    clock = FakeClock()
    journal = FakeJournal(storage)

    def make_world(life: int) -> World:
        return World(
            fleet=FakeFleet(FakeWorkers(clock), life=life),
            journal=journal,
            catalog=FakeCatalog(),
            host_watch=FakeHostWatch(),
            node_watch=FakeNodeWatch(),
            clock=clock,
            until_gone=FakeProbe().until_gone,
        )

    config = CONFIG.model_copy(update={"public_key": signer(1).public_key})
    return Supervisor(config, journal, clock, make_world)


def directive(number: int, epoch: int = 1) -> Directive:
    return Directive(
        epoch=epoch,
        number=number,
        granted=1,
        desired=Desired.RUN,
        elasticity=CONFIG.spec.elasticity,
        parallelism="auto",
        spec_version=1,
    )


def signed_directive(number: int, epoch: int = 1, **of: str) -> SignedCall:
    return signer(epoch, **of).sign(CallName.DIRECT, directive(number, epoch).model_dump(mode="json"))


def pull(epoch: int = 1, after: int = 0) -> SignedCall:
    return signer(epoch).sign(CallName.PULL, {"after": after, "wait_s": 0.0})


def refused(supervisor: Supervisor) -> list[tuple[Any, ...]]:
    events = supervisor.signed_pull(pull(supervisor._epoch)).events
    return [
        (event.data["call"], event.data["refusal"], event.data["number"])
        for event in events
        if event.type == "supervisor.call_refused"
    ]


def test_every_unsigned_call_is_refused_and_becomes_an_event() -> None:
    supervisor = opened(JournalStorage())
    for call in (
        lambda: supervisor.pull(0, 0.0, 1),
        lambda: supervisor.direct(directive(0)),
        lambda: supervisor.direct(directive(0)),
        lambda: supervisor.stacks(None, False, 1),
        lambda: supervisor.release(1),
    ):
        with pytest.raises(CallRefused) as error:
            call()
        assert error.value.refusal is Refusal.UNSIGNED
    assert refused(supervisor) == [(name, "unsigned", 1) for name in ("pull", "direct", "stacks", "release")]


def test_an_unsigned_call_with_a_high_epoch_locks_nobody_out() -> None:
    supervisor = opened(storage := JournalStorage())
    with pytest.raises(CallRefused):
        supervisor.direct(directive(0, epoch=1 << 40))
    supervisor.signed_direct(signed_directive(1))
    assert storage.epoch in (0, 1)


def test_forged_misdirected_and_replayed_directives_are_refused_by_name() -> None:
    supervisor = opened(JournalStorage())
    supervisor.signed_direct(signed_directive(5))
    for call, reason in (
        (signed_directive(6, seed="33" * 32), Refusal.FORGED),
        (signed_directive(6, job_id="another"), Refusal.MISDIRECTED),
        (signed_directive(4), Refusal.REPLAYED),
    ):
        with pytest.raises(CallRefused) as error:
            supervisor.signed_direct(call)
        assert error.value.refusal is reason
    assert refused(supervisor) == [("direct", reason, 1) for reason in ("forged", "misdirected", "replayed")]


def test_a_directive_that_ray_delivers_twice_is_no_replay() -> None:
    supervisor = opened(JournalStorage())
    supervisor.signed_direct(signed_directive(5))
    supervisor.signed_direct(signed_directive(5))
    assert refused(supervisor) == []


def test_a_control_plane_that_takes_over_begins_its_numbers_anew() -> None:
    supervisor = opened(storage := JournalStorage())
    supervisor.signed_direct(signed_directive(900))
    supervisor.signed_direct(signed_directive(1, epoch=2))
    assert storage.epoch == 2
    with pytest.raises(StaleEpoch):
        supervisor.signed_direct(signed_directive(901))


def test_a_restarted_supervisor_does_not_obey_older_directives_than_its_journal_has() -> None:
    kept = entry(7).model_copy(update={"end": None, "directive": directive(5)})
    supervisor = opened(JournalStorage(entries={1: kept.model_dump_json()}, starts=[900.0]))
    with pytest.raises(CallRefused) as error:
        supervisor.signed_direct(signed_directive(4))
    assert error.value.refusal is Refusal.REPLAYED
    supervisor.signed_direct(signed_directive(6))


def test_a_signed_release_deletes_the_journal() -> None:
    supervisor = opened(storage := JournalStorage())
    supervisor.signed_release(signer(1).sign(CallName.RELEASE, {}))
    assert storage == JournalStorage()
