"""One attempt whose calls are signed, driven with a real store and a fake cluster that verifies the signatures."""

from __future__ import annotations

import pytest

from doubles.driver_bench import DriverBench, event
from doubles.event_loop import run, settle, until
from doubles.fake_cluster import FakeSupervisor
from shoal_service.cluster.errors import SupervisorUnavailable
from shoal_service.control.driver import Driver
from shoal_service.signing.gate import Gate
from shoal_service.signing.signer import Signer, new_seed
from shoal_service.store.store import Store
from shoal_service.views import JobStatus
from shoal_workers.contract.job import EndReason, JobState


def public_key(bench: DriverBench) -> str:
    seed = bench.store.signing_key(bench.job_id, 1)
    assert seed is not None
    return Signer(seed, bench.job_id, 1, bench.epoch).public_key


def rekeyed(bench: DriverBench) -> int:
    return [event.type for event in bench.store.events(bench.job_id)].count("supervisor.rekeyed")


async def followed(bench: DriverBench) -> FakeSupervisor:
    supervisor = await bench.started()
    supervisor.report(event(1))
    await until(lambda: bench.events() == [1])
    return supervisor


def test_the_supervisor_gets_the_public_key_of_the_attempt_and_only_signed_calls(store: Store) -> None:
    async def main() -> None:
        bench = DriverBench(store)
        supervisor = await followed(bench)
        assert supervisor.config.public_key == public_key(bench) != ""
        assert [directive.number for directive in supervisor.directives] == [1]
        assert await bench.driver.stacks(None, native=False) is not None

    run(main())


def test_the_numbers_of_directives_rise_over_the_drivers_of_an_epoch(store: Store) -> None:
    async def main() -> None:
        bench = DriverBench(store)
        supervisor = await followed(bench)
        await bench.stop()
        bench.driver = bench.make_driver()
        bench.start()
        await until(lambda: len(supervisor.directives) == 2)
        assert [directive.number for directive in supervisor.directives] == [1, 2]

    run(main())


def test_a_control_plane_that_takes_over_signs_with_the_key_of_the_attempt(store: Store) -> None:
    async def main() -> None:
        bench = DriverBench(store)
        supervisor = await followed(bench)
        await bench.stop()
        store.release_lease("me")
        lease = store.acquire_lease("another", ttl_s=600, now=bench.clock.time())
        assert lease is not None and lease.epoch > bench.epoch
        bench.epoch, bench.numbers = lease.epoch, iter(range(1, 9))
        bench.driver = bench.make_driver()
        bench.start()
        supervisor.report(event(2))
        await until(lambda: bench.events() == [1, 2])
        assert [(d.epoch, d.number) for d in supervisor.directives] == [(bench.epoch - 1, 1), (bench.epoch, 1)]
        assert rekeyed(bench) == 0

    run(main())


def test_with_a_lost_key_another_supervisor_gets_a_new_one_and_the_attempt_goes_on(store: Store) -> None:
    async def main() -> None:
        bench = DriverBench(store)
        old = await followed(bench)
        await bench.stop()
        store.keep_signing_key(bench.job_id, 1, new_seed(), epoch=bench.epoch)
        bench.driver = bench.make_driver()
        bench.start()
        await until(lambda: rekeyed(bench) == 1)
        new = bench.supervisor
        assert new.config == old.config.model_copy(update={"public_key": public_key(bench)})
        assert new.config.public_key != old.config.public_key
        new.report(event(2))
        await until(lambda: bench.events() == [1, 2])
        assert store.get_job(bench.job_id).status.state is JobState.RUNNING and bench.cluster.reaped == []

    run(main())


def test_stacks_are_not_there_while_the_supervisor_refuses_the_key(store: Store) -> None:
    async def main() -> None:
        bench = DriverBench(store)
        supervisor = await followed(bench)
        supervisor._gate = Gate(Signer(new_seed(), bench.job_id, 1, 1).public_key, bench.job_id, 1)
        with pytest.raises(SupervisorUnavailable, match="its signature does not fit"):
            await bench.driver.stacks(None, native=False)

    run(main())


def test_with_no_key_in_the_database_a_supervisor_that_has_one_is_replaced_too(store: Store) -> None:
    async def main() -> None:
        bench = DriverBench(store)
        await followed(bench)
        await bench.stop()
        store.keep_signing_key(bench.job_id, 2, new_seed(), epoch=bench.epoch)  # of an attempt that is not this one
        bench.driver = bench.make_driver()
        bench.start()
        await until(lambda: rekeyed(bench) == 1)
        assert bench.supervisor.config.public_key == public_key(bench)

    run(main())


def test_a_supervisor_that_refuses_the_new_key_too_is_given_up_and_the_job_goes_on_from_its_checkpoint(
    store: Store,
) -> None:
    async def main() -> None:
        bench = DriverBench(store)
        await followed(bench)
        await bench.stop()
        store.keep_signing_key(bench.job_id, 1, new_seed(), epoch=bench.epoch)

        def replace(job_id: str, attempt: int, silent_node: str, public_key: str) -> bool:
            return True  # and the old one stays, as if someone had put it back

        bench.cluster.replace_supervisor = replace  # type: ignore[method-assign]
        bench.driver = bench.make_driver()
        await bench.start()
        status = store.get_job(bench.job_id).status
        assert (status.state, status.reason) == (JobState.QUEUED, EndReason.SUPERVISOR_LOST)
        assert "does not obey: the supervisor refuses the call" in status.message
        assert bench.cluster.reaped == [(bench.job_id, 1)] and rekeyed(bench) == 1

    run(main())


def test_a_directive_that_counts_as_old_is_sent_with_the_next_number(store: Store) -> None:
    async def main() -> None:
        bench = DriverBench(store)
        supervisor = await followed(bench)
        supervisor._gate.require_order(bench.epoch, 3)
        store.set_grant(bench.job_id, workers=1, reason="r", epoch=bench.epoch, now=2.0)
        bench.driver.update(bench.row, ())
        await bench.clock.advance(1.0)
        assert [(d.number, d.granted) for d in supervisor.directives] == [(1, 2), (3, 1)]

    run(main())


def test_an_attempt_that_began_without_a_key_is_driven_without_one(store: Store) -> None:
    async def main() -> None:
        bench = DriverBench(store)
        config = Driver._supervisor_config(bench.driver)
        supervisor = bench.cluster.start_supervisor(config, avoid_nodes=frozenset(), places={})
        supervisor.outbox.set_status(JobStatus(state=JobState.RUNNING, step=1), ())
        bench.start()
        supervisor.report(event(1))
        await until(lambda: bench.events() == [1])
        await settle()
        assert config.public_key == "" and store.signing_key(bench.job_id, 1) is None
        assert [directive.number for directive in supervisor.directives] == [0]
        bench.cluster.silent_node = "cut-off"
        await bench.clock.advance(2.0)
        await until(lambda: bench.supervisor is not supervisor)
        assert bench.supervisor.config == config, "its successor on another node has none either"

    run(main())
