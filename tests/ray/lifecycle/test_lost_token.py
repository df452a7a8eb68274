"""The database has lost the token of a running attempt: the attempt gets another one, and trains on."""

from __future__ import annotations

import sqlite3

from shoal_api.client import Client


def test_an_attempt_whose_token_was_lost_gets_another_one_and_no_step_is_lost(
    submit, shoal_server, client: Client
) -> None:
    run = submit(
        steps=30,
        strikes=[
            {"at": "step", "rank": 0, "n": 5, "do": "hold"},
            {"at": "step", "rank": 0, "n": 25, "do": "hold"},
        ],
    )
    run.wait_at("step-5-0")
    pids = run.pids()
    try:
        shoal_server.kill()
        with sqlite3.connect(shoal_server.state_dir / "shoal.db") as database:
            assert database.execute("DELETE FROM attempt_tokens").rowcount >= 1
        database.close()
    finally:
        shoal_server.start().wait_for_cluster()
    rekeyed = run.wait_for_event("supervisor.rekeyed")
    assert rekeyed.data == {"message": "the token of the attempt is not in the database"}
    run.release("step-5-0")
    run.wait_at("step-25-0")
    run.wait_for_step(24)
    assert run.pids() == pids
    run.release("step-25-0")
    job = run.finish()
    assert job.status.attempt == 1 and job.status.steps_lost == 0 and client.incidents(run.id) == ()
    assert run.world_sizes() == [2]
    run.assert_undisturbed_losses()
