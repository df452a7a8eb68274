"""Why a running job gets no more workers: one example for each answer, with the words that a user reads."""

from kit.market import NOW, carried_out, grants, job, market, nodes
from shoal_service.core.scheduling.decide import decide
from shoal_service.core.scheduling.explaining import GrowthLimit, HeldBack, explain_held_back
from shoal_service.core.scheduling.market import MarketNode, MarketState, Project, ThroughputCurve

LINEAR = ThroughputCurve((1, 8), (10.0, 80.0))


def answers(state: MarketState) -> dict[str, HeldBack]:
    return {one.job_id: one for one in explain_held_back(state, NOW)}


def test_growth_that_costs_more_than_it_saves_near_the_end_says_both() -> None:
    ends = job("ends", 1, 4, granted=2, left=60.0, switch_s=2.0, curve=LINEAR)
    state = market([ends], nodes(8))
    assert decide(state, NOW) == [], "the market grants nothing"
    assert answers(state)["ends"] == HeldBack(
        "ends",
        2,
        4,
        GrowthLimit.PAUSE_COSTS_MORE,
        "It ends in about 3.0 s. Growing to 4 workers saves 1.5 s of that and costs a pause of 2.0 s. Raise "
        "elasticity.min_workers to force it.",
    )


def test_growth_that_costs_more_than_it_saves_within_the_horizon_says_so() -> None:
    flat = ThroughputCurve((1, 2, 4), (10.0, 19.0, 19.2))
    slow = job("slow", 1, 4, granted=2, switch_s=60.0, curve=flat)
    assert answers(market([slow], nodes(8)))["slow"].reason == (
        "Growing to 4 workers saves 1.3 s in the next 2 min 00 s and costs a pause of 60 s. Raise "
        "elasticity.min_workers to force it."
    )


def test_a_raised_minimum_is_granted_all_the_same() -> None:
    ends = job("ends", 4, 4, granted=2, left=60.0, switch_s=2.0, curve=LINEAR)
    state = carried_out(market([ends], nodes(8)), decide(market([ends], nodes(8)), NOW))
    assert grants(state) == {"ends": 4}


def test_a_curve_that_does_not_rise_is_named() -> None:
    flat = ThroughputCurve((1, 2, 4), (10.0, 19.0, 18.0))
    answer = answers(market([job("flat", 1, 4, granted=2, curve=flat)], nodes(8)))["flat"]
    assert answer.limit is GrowthLimit.NO_FASTER
    assert answer.reason == "By what was predicted and measured, it trains no faster with more than 2 workers."


def test_the_limit_of_a_parent_project_is_named() -> None:
    jobs = [job("one", 1, 4, granted=2, project="child"), job("two", 1, 1, granted=1, project="child")]
    state = market(jobs, nodes(8), Project(name="child", parent="top"), Project(name="top", limit=3))
    assert answers(state)["one"].limit is GrowthLimit.QUOTA
    assert answers(state)["one"].reason == "Project top has 3 of its limit of 3 workers. Raise the limit."


def test_jobs_that_hold_workers_above_their_minima_are_named() -> None:
    jobs = [job("one", 1, 4, granted=1), job("two", 1, 4, granted=3), job("three", 2, 2, granted=2)]
    answer = answers(market(jobs, nodes(6)))["one"]
    assert answer.limit is GrowthLimit.OTHERS_GAIN_MORE
    assert answer.reason == (
        "No worker (1 CPU) is free. two holds 2 above the minimum, which add more there than here. Raise the priority "
        "above 0, or add nodes."
    )


def test_a_cluster_full_of_minima_is_named() -> None:
    jobs = [job("one", 1, 4, granted=1), job("two", 2, 2, granted=2)]
    answer = answers(market(jobs, nodes(3)))["one"]
    assert answer.limit is GrowthLimit.NO_ROOM
    assert answer.reason == (
        "The nodes that it may use have no room for another worker (1 CPU): other jobs need all of it for their "
        "minimum, or have reserved it. Add nodes."
    )


def test_a_cordoned_node_is_no_room() -> None:
    cordoned = MarketNode(node_id="n1", cpus=4.0, is_cordoned=True)
    state = market([job("one", 1, 4, granted=1, on_nodes={"n1": 1})], [cordoned])
    assert answers(state)["one"].limit is GrowthLimit.NO_ROOM


def test_a_job_below_a_raised_minimum_has_another_reason_than_the_pause() -> None:
    raised = job("raised", 4, 4, granted=2, left=20.0, switch_s=30.0)
    assert answers(market([raised], nodes(2)))["raised"].limit is GrowthLimit.NO_ROOM


def test_room_that_the_next_decision_may_use_is_named() -> None:
    state = market([job("one", 1, 4, granted=2)], nodes(8))
    assert answers(state)["one"].limit is GrowthLimit.SOON
    assert answers(state)["one"].reason == "There is room for 2 workers more (+79 %): it may grow soon."
    assert answers(carried_out(state, decide(state, NOW))) == {}, "and it does"


def test_jobs_with_their_most_leaving_jobs_and_queued_ones_have_no_answer() -> None:
    jobs = [job("whole", 1, 2, granted=2), job("leaving", 1, 4, granted=1, is_leaving=True), job("queued", 9, 9)]
    assert explain_held_back(market(jobs, nodes(3)), NOW) == []
