"""`deterministic: true` through the whole service: neither the world size nor a death changes a bit of the losses."""

from __future__ import annotations

import pytest

from shoal_api.client import Client


def bits(client: Client, job_id: str) -> list[tuple[int, str, str]]:
    return [(point.step, point.loss.hex(), point.grad_norm.hex()) for point in client.series(job_id)]


@pytest.mark.matrix
def test_a_job_that_loses_a_worker_equals_bit_for_bit_one_of_another_world_size(submit, client: Client) -> None:
    alone = submit(workers=1, deterministic=True)
    struck = submit(workers=3, deterministic=True, strikes=[{"at": "step", "rank": 1, "n": 7, "do": "kill"}])
    alone.finish()
    struck.finish()
    assert len(client.incidents(struck.id)) == 1
    assert struck.world_sizes()[0] == 3
    assert bits(client, struck.id) == bits(client, alone.id)
    assert len(bits(client, alone.id)) == 20
    alone.assert_undisturbed_losses()
