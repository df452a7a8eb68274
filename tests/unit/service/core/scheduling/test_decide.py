"""The rules of the policy, one by one, with the words that a user reads; and the rates of a job between known sizes."""

from dataclasses import replace

import pytest

from kit.cases import failed_cases
from kit.market import CPU, NOW, carried_out, grants, job, market, nodes, reasons
from shoal_service.core.scheduling.decide import decide
from shoal_service.core.scheduling.market import (
    Decision,
    MarketNode,
    MarketState,
    Preempt,
    Project,
    Resize,
    Start,
    ThroughputCurve,
    User,
    Wait,
    WorkerNeed,
)
from shoal_workers.contract.placing import CapacityKind

NODE = [MarketNode(node_id="n1", cpus=8.0)]


def after(state: MarketState) -> dict[str, int]:
    return grants(carried_out(state, decide(state, NOW)))


def only(decisions: list[Decision], name: str) -> Decision:
    (found,) = [one for one in decisions if one.job_id == name]
    return found


def test_a_newcomer_is_admitted_by_shrinking_a_running_job_at_once() -> None:
    state = market([job("first", 1, 4, granted=4), job("second", 1, 1)], nodes(4))

    decisions = decide(state, NOW)

    assert decisions == [
        Resize("first", 3, "Gave 1 worker to second, which starts with 1: -22 % here.", (("second", 1),)),
        Start("second", 1, "Starting with 1 worker (1 CPU each); first gives workers.", flows=(("first", 1),)),
    ]


def test_free_workers_start_a_job_at_its_most() -> None:
    state = market([job("only", 1, 4)], nodes(2, 8))
    assert decide(state, NOW) == [Start("only", 4, "Starting with 4 workers of 1 to 4 (1 CPU each).")]


def test_workers_move_to_the_job_that_gains_most_and_both_reasons_say_so() -> None:
    flat = ThroughputCurve((1, 2, 4), (10.0, 10.5, 11.0))
    state = market([job("flat", 1, 4, granted=4, curve=flat), job("steep", 1, 4, granted=1)], nodes(5))

    decisions = decide(state, NOW)

    assert decisions == [
        Resize("flat", 1, "Gave 3 workers to steep: +240 % there, -9 % here.", (("steep", 3),)),
        Resize("steep", 4, "Got 3 workers from flat: +240 % here, -9 % there.", (("flat", 3),)),
    ]


_DIPS = ThroughputCurve((1, 2, 3, 4), (10.0, 19.0, 12.0, 15.0))
_BORROWER, _OWNER = job("borrower", 1, 8, granted=8, project="a"), job("owner", 1, 8, project="b")
_QUOTAS = (Project(name="a"), Project(name="b", guaranteed=6))
_LAB = (Project(name="lab"), Project(name="other"), Project(name="x", parent="lab"), Project(name="y", parent="lab"))
_ON_OLD = job("stays", 1, 8, granted=4, on_nodes={"old": 4})
_GPU = job("gpu", 4, 4, need=WorkerNeed(cpus=1, gpus=1))
GRANTS: dict[str, tuple[MarketState, dict[str, int]]] = {
    "a size that is slower than a smaller one is not used": (market([job("d", 1, 4, curve=_DIPS)], nodes(4)), {"d": 2}),
    "a job that ends soon gets more than an equal one that does not": (
        market([job("long", 1, 16, left=1e7), job("short", 1, 16, left=1e5)], nodes(12)),
        {"short": 8, "long": 4},
    ),
    "what is guaranteed is reclaimed by shrinking borrowers": (
        market([_BORROWER, _OWNER], nodes(8), *_QUOTAS),
        {"borrower": 2, "owner": 6},
    ),
    "idle quota is borrowed": (market([replace(_BORROWER, granted=0)], nodes(8), *_QUOTAS), {"borrower": 8}),
    "sub-projects share what their parent is entitled to": (
        market([job(name, 1, 16, project=name) for name in ("x", "y", "other")], nodes(16), *_LAB),
        {"x": 4, "y": 4, "other": 8},
    ),
    "a job below a raised minimum is served before the queue": (
        market([job("raised", 4, 4, granted=2), job("new", 2, 2, submitted_at=NOW - 9)], nodes(4)),
        {"raised": 4},
    ),
    "a lost node saves no grant above the project's limit": (
        market([job("a", 1, 8, granted=8)], nodes(6), Project(name="default", limit=4)),
        {"a": 4},
    ),
    "a cordoned node keeps its workers and gets no new ones": (
        market([_ON_OLD, job("new", 1, 8)], [MarketNode(node_id="old", cpus=4, is_cordoned=True), *nodes(2)]),
        {"stays": 4, "new": 2},
    ),
    "workers are indivisible": (market([job("wide", 1, 4, need=WorkerNeed(cpus=2.0))], nodes(3, 3)), {"wide": 2}),
    "GPU nodes are left to workers with GPUs": (
        market(
            [job("cpu", 4, 4, need=CPU), _GPU],
            [MarketNode(node_id="a-gpu", cpus=4, gpus=4), MarketNode(node_id="b-cpu", cpus=4)],
        ),
        {"cpu": 4, "gpu": 4},
    ),
}


def test_these_markets_are_divided_so() -> None:
    def check(name: str) -> None:
        state, expected = GRANTS[name]
        assert after(state) == expected

    assert failed_cases(check, GRANTS) == {}


def test_priority_weighs_on_what_is_above_the_minimum() -> None:
    jobs = [job("low", 1, 16), job("high", 1, 16, priority=20)]
    got = after(market(jobs, nodes(12)))
    assert got["high"] > got["low"] >= 1


def test_an_urgent_job_preempts_only_lower_priorities_and_only_as_many_as_it_needs() -> None:
    jobs = [
        job("old", 2, 2, granted=2, priority=5, submitted_at=NOW - 9),
        job("lowest", 1, 1, granted=1, priority=-5),
        job("low", 1, 1, granted=1),
        job("urgent", 1, 1, priority=5),
    ]
    state = market(jobs, nodes(4))

    decisions = decide(state, NOW)

    assert decisions == [
        Preempt(
            "lowest",
            "Preempted for urgent (priority 5, here -5), which needs 1 worker. It saves and returns to the queue; "
            "no step is lost.",
            "urgent",
            (("urgent", 1),),
        ),
        Start(
            "urgent",
            1,
            "Starting with 1 worker (1 CPU each); preempts lowest by its priority of 5.",
            flows=(("lowest", 1),),
        ),
    ]


def test_nothing_is_preempted_if_shrinking_is_enough_or_preemption_would_not_do() -> None:
    shrink = market([job("low", 1, 4, granted=4), job("urgent", 3, 3, priority=9)], nodes(4))
    assert after(shrink) == {"low": 1, "urgent": 3}
    vain = market(
        [job("peer", 2, 2, granted=2, priority=9), job("low", 2, 2, granted=2), job("urgent", 3, 3, priority=9)],
        nodes(4),
    )
    assert after(vain) == {"peer": 2, "low": 2}


def test_the_limit_of_a_project_is_never_exceeded_and_the_reason_names_it() -> None:
    jobs = [job("a", 2, 8, project="p"), job("b", 2, 2, project="p", submitted_at=NOW + 1)]
    state = market(jobs, nodes(16), Project(name="p", limit=3))

    decisions = decide(state, NOW)

    assert after(state) == {"a": 3} or after(state) == {"b": 2}
    (wait,) = [one for one in decisions if isinstance(one, Wait)]
    assert "project p" in wait.reason and "limit of 3" in wait.reason and "Raise the limit" in wait.reason
    assert wait.holders


def test_a_minimum_above_the_limit_never_starts_and_says_so() -> None:
    state = market(
        [job("big", 4, 4, project="p"), job("small", 1, 1, project="p")], nodes(8), Project(name="p", limit=3)
    )
    assert after(state) == {"small": 1}
    assert "may have 3 workers (its limit)" in reasons(decide(state, NOW))["big"]


def test_projects_share_by_weight_whatever_their_number_of_jobs() -> None:
    jobs = [job(f"many-{at}", 1, 8, project="many") for at in range(5)] + [job("one", 1, 16, project="one")]
    got = after(market(jobs, nodes(16), Project(name="many", weight=1.0), Project(name="one", weight=1.0)))
    assert got["one"] == 8


def test_a_sweep_has_at_most_its_limit_of_jobs_with_workers() -> None:
    jobs = [job(f"j{n}", 1, 1, sweep="lr", sweep_limit=2, submitted_at=NOW + n) for n in range(5)]
    other = job("other", 1, 1, sweep="lr", sweep_limit=2, project="p")
    state = market([*jobs, other, job("free", 1, 1)], nodes(16), Project(name="p"))
    decisions = decide(state, NOW)
    begun = carried_out(state, decisions)
    assert set(grants(begun)) == {"j0", "j1", "other", "free"}, "the sweep of that name in another project is another"
    [waits, *_] = [one for one in decisions if isinstance(one, Wait)]
    assert waits.reason == (
        "Sweep lr has 2 jobs with workers, and its limit is 2 (sweep.limit). Waits until one of them ends."
    )
    assert waits.holders == ("j0", "j1") and waits.waits_for_limit, "more nodes would not help"
    ended = replace(begun, jobs=[one for one in begun.jobs if one.job_id != "j0"])
    assert set(grants(carried_out(ended, decide(ended, NOW)))) == {"j1", "j2", "other", "free"}


def test_a_leaving_job_of_a_sweep_counts_until_it_is_gone() -> None:
    leaving = job("old", 1, 1, granted=1, held=1, sweep="lr", sweep_limit=1, is_leaving=True)
    [waits] = decide(market([leaving, job("new", 1, 1, sweep="lr", sweep_limit=1)], nodes(4)), NOW)
    assert isinstance(waits, Wait) and waits.holders == ("old",)


def test_max_running_of_a_project_and_of_a_user() -> None:
    jobs = [job("a", project="p"), job("b", project="p", submitted_at=NOW + 1)]
    state = market(jobs, nodes(16), Project(name="p", max_running=1))
    assert set(after(state)) == {"a"}
    assert "max_running is 1" in reasons(decide(state, NOW))["b"]
    users = market(
        [job("a", user="u"), job("b", user="u", submitted_at=NOW + 1), job("c", user="v")],
        nodes(16),
        users={"default": User(name="default", max_running=1)},
    )
    assert set(after(users)) == {"a", "c"}
    [wait] = [one for one in decide(users, NOW) if isinstance(one, Wait)]
    assert wait.holders == ("a",)
    assert wait.reason.startswith("User u runs 1 job, and may run 1 at a time (max_running).")
    own = replace(users, users={**users.users, "u": User(name="u", max_running=2)})
    assert set(after(own)) == {"a", "b", "c"}


def test_a_job_that_never_fits_blocks_nobody_and_its_reason_says_so() -> None:
    state = market([job("huge", 100, 100, submitted_at=NOW - 1), job("small", 1, 1)], nodes(4))
    assert after(state) == {"small": 1}
    assert reasons(decide(state, NOW))["huge"] == (
        "Needs 100 workers of 1 CPU each; the nodes that it may use have room for 4. "
        "Add nodes, or lower elasticity.min_workers."
    )


def test_a_short_job_is_backfilled_and_a_long_one_would_delay_the_reserved_start() -> None:
    running = job("running", 6, 6, granted=6, curve=ThroughputCurve((6,), (60.0,)), left=60.0 * 1000)
    head = job("head", 8, 8, submitted_at=NOW - 9000)
    short = job("short", 1, 1, left=10.0 * 500)
    long = job("long", 1, 1, left=10.0 * 5000)
    state = market([running, head, short, long], nodes(8))

    decisions = decide(state, NOW)

    assert after(state) == {"running": 6, "short": 1}
    wait = only(decisions, "head")
    assert (
        isinstance(wait, Wait) and wait.position == 1 and wait.expected_at == NOW + 1000 and "running" in wait.holders
    )
    assert "would delay head" in reasons(decisions)["long"]


def test_a_start_is_expected_only_behind_jobs_whose_speed_was_measured() -> None:
    """A prediction may be wrong by a factor of fifty: the expected start moved along until the first steps were over,
    and then jumped."""
    running = job("running", 4, 4, granted=4, curve=ThroughputCurve((4,), (40.0,)), left=40.0 * 100)
    head = job("head", 2, 2)
    guessed = only(decide(market([replace(running, is_measured=False), head], nodes(4)), NOW), "head")
    assert isinstance(guessed, Wait) and guessed.expected_at is None and guessed.holders == ("running",)
    measured = only(decide(market([running, head], nodes(4)), NOW), "head")
    assert isinstance(measured, Wait) and measured.expected_at == NOW + 100


def test_a_job_of_another_shape_is_backfilled_on_what_the_nodes_can_spare() -> None:
    """The reserved start takes 6 of 8 CPUs, those of `running`; 2 are spare for workers of any size."""
    large = WorkerNeed(cpus=3.0)
    running = job("running", 2, 2, granted=2, need=large)
    head = job("head", 2, 2, submitted_at=NOW - 9, need=large)
    small = job("small", 1, 1, need=WorkerNeed(cpus=2.0))
    assert after(market([running, head, small], NODE)) == {"running": 2, "small": 1}


def test_room_that_is_free_now_and_reserved_is_not_given_to_another_shape() -> None:
    running = job("running", 1, 1, granted=1, need=WorkerNeed(cpus=3.0))
    head = job("head", 2, 2, submitted_at=NOW - 9, need=WorkerNeed(cpus=4.0))
    state = market([running, head, job("small", 1, 1)], NODE)
    assert after(state) == {"running": 1}
    assert "would delay head" in reasons(decide(state, NOW))["small"]


def test_a_job_for_which_nothing_is_free_says_so_and_not_whose_start_it_would_delay() -> None:
    """`head` and `other` have different workers, so the room for the one says nothing of the room for the other."""
    running = job("running", 8, 8, granted=8, curve=ThroughputCurve((8,), (80.0,)))
    head = job("head", 2, 2, submitted_at=NOW - 9000)
    other = job("other", 1, 1, need=WorkerNeed(cpus=2.0))
    decisions = decide(market([running, head, other], nodes(8)), NOW)
    assert reasons(decisions)["other"].startswith(
        "Needs 1 worker of 2 CPU each; 0 can be freed by shrinking other jobs"
    )


def test_jobs_that_lost_nodes_keep_their_claims_until_another_job_gains() -> None:
    stricken = [job("a", 1, 8, granted=8), job("b", 2, 4, granted=2)]
    assert decide(market(stricken, nodes(6)), NOW) == []
    grants = after(market([*stricken, job("new", 1, 1)], nodes(6)))
    assert grants["new"] == 1 and sum(grants.values()) == 6


def test_a_job_whose_minimum_no_longer_fits_keeps_its_claim_until_another_job_can_use_the_workers() -> None:
    stranded = job("stranded", 4, 4, granted=4)
    assert decide(market([stranded], nodes(3)), NOW) == []
    state = market([stranded, job("other", 1, 2)], nodes(3))
    assert after(state) == {"other": 2}
    assert isinstance(only(decide(state, NOW), "stranded"), Preempt)


def test_selectors_and_capacity_kinds_choose_nodes() -> None:
    cluster = [
        MarketNode(node_id="h100", cpus=4, labels={"gpu_type": "h100"}),
        MarketNode(node_id="spot", cpus=4, is_spot=True),
    ]
    jobs = [
        job("selects", 1, 8, selector={"gpu_type": "h100"}),
        job("spot", 1, 8, capacity=CapacityKind.SPOT),
        job("stable", 1, 8, capacity=CapacityKind.ON_DEMAND),
    ]
    got = after(market(jobs, cluster))
    assert got["spot"] == 4 and got["selects"] + got["stable"] == 4


def test_a_deadline_gets_the_workers_that_it_needs() -> None:
    due = job("due", 1, 16, left=55.0 * 1000, finish_by=NOW + 1010)
    others = [job(f"other-{at}", 1, 16, left=1000.0) for at in range(3)]
    assert after(market([due, *others], nodes(12)))["due"] >= 8


def test_a_job_that_is_leaving_keeps_its_workers_and_gets_no_decision() -> None:
    state = market([job("leaving", 1, 4, granted=2, held=3, is_leaving=True), job("new", 1, 4)], nodes(4))
    assert decide(state, NOW) == [Start("new", 1, "Starting with 1 worker of 1 to 4 (1 CPU each).")]


def test_a_job_about_to_end_is_left_alone() -> None:
    ending = job("ending", 1, 16, granted=4, left=10.0, curve=ThroughputCurve((1, 4, 16), (10.0, 34.0, 100.0)))
    assert decide(market([ending], nodes(16)), NOW) == []


def test_a_job_that_just_moved_stays_where_it_is() -> None:
    jobs = [job("a", 1, 8, granted=6, moved_at=NOW), job("b", 1, 8, granted=2, moved_at=NOW)]
    assert decide(market(jobs, nodes(8)), NOW) == []
    assert decide(market(jobs, nodes(8)), NOW + 60)


def test_a_clock_that_was_set_back_since_the_last_move_freezes_nothing() -> None:
    jobs = [job("a", 1, 8, granted=6, moved_at=NOW), job("b", 1, 8, granted=2, moved_at=NOW)]
    assert decide(market(jobs, nodes(8)), NOW - 3600)


CURVE = ThroughputCurve((2, 4, 8), (10.0, 16.0, 24.0))


@pytest.mark.parametrize(
    ("workers", "rate"),
    [(0, 0.0), (1, 5.0), (2, 10.0), (3, 13.0), (4, 16.0), (6, 20.0), (8, 24.0), (100, 24.0)],
)
def test_the_rate_is_interpolated_between_the_known_sizes(workers: int, rate: float) -> None:
    assert CURVE.rate(workers) == pytest.approx(rate)


def test_a_linear_curve_scales_perfectly_up_to_its_largest_size() -> None:
    curve = ThroughputCurve.linear(3.0, 4)
    assert [curve.rate(n) for n in (1, 2, 4, 5)] == [3.0, 6.0, 12.0, 12.0]


def test_sizes_must_rise() -> None:
    with pytest.raises(AssertionError):
        ThroughputCurve((4, 2), (1.0, 2.0))
