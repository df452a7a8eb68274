"""What others than Shoal's jobs have reserved: from totals, what is free, and what Shoal's workers have."""

from shoal_service.clusters.snapshot import ClusterSnapshot, Reservation
from shoal_service.control.market.capacity import ForeignUse
from shoal_service.core.nodes import Node
from shoal_service.core.scheduling.market import WorkerNeed

ONE = WorkerNeed(cpus=1.0)
NODE = Node(node_id="n1", ip="10.0.0.1", alive=True, cpus=4.0, gpus=0.0, memory_gib=8.0)


def seen(free: float, *workers: Reservation, memory_gib: float = 8.0) -> ClusterSnapshot:
    return ClusterSnapshot((NODE,), {"n1": WorkerNeed(cpus=free, memory_gib=memory_gib)}, workers)


def worker(index: int, *, job: str = "job-a", is_alive: bool = True) -> Reservation:
    return Reservation(f"shoal/{job}/1/worker-{index}", job, "n1", ONE, is_alive)


def test_what_nobody_of_us_has_reserved_is_foreign_from_the_first_look_on() -> None:
    found = ForeignUse().observe(seen(1.5, worker(0), memory_gib=6.0), {"job-a"}, 0.0)
    assert found == {"n1": WorkerNeed(cpus=1.5, memory_gib=2.0)}


def test_workers_of_another_service_on_the_same_cluster_are_foreign() -> None:
    found = ForeignUse().observe(seen(2.0, worker(0), worker(1, job="job-of-others")), {"job-a"}, 0.0)
    assert found == {"n1": ONE}


def test_a_worker_that_has_just_ended_is_not_taken_for_a_tenant() -> None:
    use = ForeignUse()
    assert use.observe(seen(2.0, worker(0), worker(1)), {"job-a"}, 0.0) == {}
    assert use.observe(seen(2.0, worker(0)), {"job-a"}, 1.0) == {}, "Ray reports its resources as free a little later"
    assert use.observe(seen(3.0, worker(0)), {"job-a"}, 2.0) == {}


def test_a_tenant_that_comes_while_no_worker_of_ours_comes_or_goes_counts_at_once() -> None:
    use = ForeignUse()
    assert use.observe(seen(3.0, worker(0)), {"job-a"}, 0.0) == {}
    assert use.observe(seen(1.0, worker(0)), {"job-a"}, 1.0) == {"n1": WorkerNeed(cpus=2.0)}
    assert use.observe(seen(3.0, worker(0)), {"job-a"}, 2.0) == {}


def test_a_tenant_that_comes_as_a_worker_ends_counts_once_it_has_stayed() -> None:
    use = ForeignUse()
    use.observe(seen(2.0, worker(0), worker(1)), {"job-a"}, 0.0)
    assert use.observe(seen(1.0, worker(0)), {"job-a"}, 1.0) == {}
    assert use.observe(seen(1.0, worker(0)), {"job-a"}, 4.5) == {}
    assert use.observe(seen(1.0, worker(0)), {"job-a"}, 5.0) == {"n1": WorkerNeed(cpus=2.0)}


def test_a_worker_that_starts_hides_no_tenant() -> None:
    """Ray lists it before its resources are taken."""
    use, starting = ForeignUse(), worker(1, is_alive=False)
    assert use.observe(seen(1.0, worker(0)), {"job-a"}, 0.0) == {"n1": WorkerNeed(cpus=2.0)}
    assert use.observe(seen(1.0, worker(0), starting), {"job-a"}, 1.0) == {"n1": WorkerNeed(cpus=2.0)}
    assert use.observe(seen(0.0, worker(0), worker(1)), {"job-a"}, 2.0) == {"n1": WorkerNeed(cpus=2.0)}


def test_a_worker_that_is_created_for_long_waits_for_what_another_has() -> None:
    use, waiting = ForeignUse(), worker(1, is_alive=False)
    assert use.observe(seen(3.0, worker(0)), {"job-a"}, 0.0) == {}
    for second in range(1, 120):
        assert use.observe(seen(0.0, worker(0), waiting), {"job-a"}, float(second)) == {}, "it may be starting"
    for second in range(120, 127):
        found = use.observe(seen(0.0, worker(0), waiting), {"job-a"}, float(second))
    assert found == {"n1": WorkerNeed(cpus=3.0)}


def test_nothing_is_known_of_a_node_that_has_not_reported_or_is_dead() -> None:
    dead = NODE.model_copy(update={"alive": False})
    assert ForeignUse().observe(ClusterSnapshot((NODE,)), set(), 0.0) == {}
    assert ForeignUse().observe(ClusterSnapshot((dead,), {"n1": ONE}), set(), 0.0) == {}


def test_a_sum_of_fractions_costs_no_worker() -> None:
    thirds = [
        Reservation(f"shoal/job-a/1/worker-{i}", "job-a", "n1", WorkerNeed(cpus=0.1), is_alive=True) for i in range(3)
    ]
    assert ForeignUse().observe(seen(3.7, *thirds), {"job-a"}, 0.0) == {}
