"""A job on a real cluster without faults."""

from __future__ import annotations

import pytest

from shoal_api.client import Client


@pytest.mark.matrix
def test_the_losses_do_not_depend_on_the_world_size(submit, client: Client) -> None:
    four = submit(workers=4)
    job = four.finish()
    assert job.status.step == job.status.total_steps == 20
    assert four.world_sizes() == [4]
    assert client.incidents(four.id) == ()
    assert job.status.steps_lost == 0
    four.assert_undisturbed_losses()

    one = submit(workers=1)
    one.finish()
    one.assert_undisturbed_losses()  # those of two workers
    assert four.losses() == pytest.approx(one.losses(), rel=1e-5, abs=1e-6)
