import pytest

from shoal_workers.contract.layout import fully_sharded
from shoal_workers.contract.messages import Assignment, later_to_form_s


@pytest.mark.parametrize(("world_size", "later_s"), [(1, 0.0), (64, 0.0), (65, 0.05), (1024, 48.0), (16384, 816.0)])
def test_the_deadlines_of_forming_grow_with_the_group(world_size: int, later_s: float) -> None:
    assignment = Assignment(
        job_id="job",
        attempt=1,
        generation=1,
        rank=0,
        layout=fully_sharded(world_size),
        store_host="10.0.0.1",
        store_port=1,
        restore_from=None,
        store_timeout_s=60.0,
        connect_timeout_s=15.0,
    )
    assert later_to_form_s(world_size) == pytest.approx(later_s)
    assert assignment.rendezvous_s == pytest.approx(60.0 + later_s)
    assert assignment.connect_s == pytest.approx(15.0 + later_s)
