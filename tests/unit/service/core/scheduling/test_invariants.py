"""What holds for every decision, over random markets."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from kit.cases import failed_cases
from kit.market import NOW, carried_out, grants, market
from kit.random_markets import NEEDS, clustered_markets, markets, may_use, of_one_kind, random_market
from shoal_service.core.scheduling.admission import has_waited
from shoal_service.core.scheduling.decide import after, decide
from shoal_service.core.scheduling.explaining import explain_held_back
from shoal_service.core.scheduling.market import (
    MAX_OVERTAKEN_S,
    Decision,
    MarketJob,
    MarketNode,
    MarketState,
    Preempt,
    Project,
    Resize,
    Start,
    ThroughputCurve,
    User,
    Wait,
)
from shoal_workers.contract.placing import CapacityKind

EXAMPLES, MANY_EXAMPLES = 60, 500
Change = Start | Resize | Preempt

BUSY = MarketJob(
    job_id="busy",
    submitted_at=NOW,
    min_workers=1,
    max_workers=8,
    need=NEEDS[0],
    curve=ThroughputCurve((1, 2, 4, 8), (10.0, 19.0, 34.0, 55.0)),
)


def subtree_of(state: MarketState, name: str) -> set[str]:
    return {name} | {one.name for one in state.projects.values() if one.parent == name}


def workers_in(state: MarketState, names: set[str]) -> int:
    return sum(one.granted for one in state.jobs if one.project in names)


def upper_bound(state: MarketState, names: list[MarketJob]) -> float:
    """CPUs of the nodes that any of these jobs may use."""
    return sum(node.cpus for node in state.nodes if any(may_use(one, node) for one in names))


def there_is_one_decision_for_each_queued_job_and_at_most_one_for_a_running_one(state: MarketState) -> None:
    decisions = decide(state, NOW)
    times = Counter(one.job_id for one in decisions)
    assert all(number == 1 for number in times.values())
    by_id = {one.job_id: one for one in state.jobs}
    for one in state.jobs:
        if not one.granted and not one.is_leaving:
            assert times[one.job_id] == 1
    for decision in decisions:
        if by_id[decision.job_id].granted:
            assert isinstance(decision, Resize | Preempt)
        else:
            assert isinstance(decision, Start | Wait)
        assert decision.reason.endswith(".")
    positions = [one.position for one in decisions if isinstance(one, Wait)]
    assert positions == list(range(1, len(positions) + 1))


def workers_never_exceed_what_the_nodes_hold(state: MarketState) -> None:
    """Each set of jobs that use the same nodes has at most their CPUs; all jobs together have at most all CPUs."""
    after = carried_out(state, decide(state, NOW))
    running = [one for one in after.jobs if one.granted]
    groups = {(one.capacity, tuple(one.selector.items())) for one in running}
    for group in [*groups, None]:
        members = [one for one in running if group in (None, (one.capacity, tuple(one.selector.items())))]
        assert sum(one.granted * one.need.cpus for one in members) <= upper_bound(after, members) + 1e-6
        assert sum(one.granted * one.need.gpus for one in members) <= sum(node.gpus for node in after.nodes)


def no_limit_is_exceeded(state: MarketState) -> None:
    after = carried_out(state, decide(state, NOW))
    for project in state.projects.values():
        before = workers_in(state, subtree_of(state, project.name))
        if project.limit is not None:
            assert workers_in(after, subtree_of(state, project.name)) <= max(project.limit, 0), project.name
        if project.max_running is not None:
            names = subtree_of(state, project.name)
            ran = sum(one.granted > 0 for one in state.jobs if one.project in names)
            runs = sum(one.granted > 0 for one in after.jobs if one.project in names)
            assert runs <= max(project.max_running, ran), before
    for user in ("u", "v"):
        most = (state.users.get(user) or state.users.get("default") or User(name=user)).max_running
        if most is not None:
            runs, ran = (sum(one.user == user and one.granted > 0 for one in market.jobs) for market in (after, state))
            assert runs <= max(most, ran)


def no_job_is_below_its_minimum_or_above_its_maximum(state: MarketState) -> None:
    for one in carried_out(state, decide(state, NOW)).jobs:
        assert one.granted == 0 or one.min_workers <= one.granted <= one.max_workers


def only_lower_priorities_are_preempted_and_the_beneficiary_starts(state: MarketState) -> None:
    decisions = decide(state, NOW)
    by_id = {one.job_id: one for one in state.jobs}
    started = {one.job_id for one in decisions if isinstance(one, Start)}
    for one in decisions:
        if isinstance(one, Preempt) and one.beneficiary:
            victim, urgent = by_id[one.job_id], by_id[one.beneficiary]
            is_owed = has_waited(urgent, NOW) and "guaranteed to project" in one.reason
            assert victim.priority < urgent.priority or (victim.priority == urgent.priority and is_owed), one.reason
            assert one.beneficiary in started or by_id[one.beneficiary].granted


def repetition_changes_nothing(state: MarketState) -> None:
    """At once, as long as preempted jobs are still about to leave."""
    outcome = after(state, changes_of(decide(state, NOW)), NOW)
    assert changes_of(decide(outcome, NOW)) == []


def jobs_that_were_preempted_settle_at_their_return(state: MarketState) -> None:
    """They may start again elsewhere, others then take what is left, and after that nothing changes. On one kind of
    worker and node: where nodes differ, a start may count on the place of a worker that stays."""
    state = of_one_kind(state)
    for _ in range(3):  # of 6,000 markets with several clusters one needs the third
        state = carried_out(state, decide(state, NOW))
    assert changes_of(decide(state, NOW)) == []


def changes_of(decisions: Sequence[Decision]) -> list[Change]:
    return [one for one in decisions if not isinstance(one, Wait)]


def what_is_guaranteed_is_not_left_to_borrowers(state: MarketState) -> None:
    """On one kind of worker and node: if a project below its guarantee waits, no borrower can be shrunk, and none of
    its priority or of a lower one could be preempted for a job that has waited for the grace."""
    state = of_one_kind(state)
    plain = [replace(one, user="", project=one.project.split("-")[0]) for one in state.jobs]
    cluster = [replace(node, cpus=8.0) for node in state.nodes]
    projects = {
        name: replace(one, limit=None, max_running=None, parent=None)
        for name, one in state.projects.items()
        if "-" not in name
    }
    state = carried_out(
        MarketState(jobs=plain, nodes=cluster, projects=projects),
        decide(MarketState(jobs=plain, nodes=cluster, projects=projects), NOW),
    )
    for wait in (one for one in decide(state, NOW) if isinstance(one, Wait)):
        waiting = next(one for one in state.jobs if one.job_id == wait.job_id)
        project = projects.get(waiting.project)
        mine = workers_in(state, {waiting.project})
        if project and mine + waiting.min_workers <= project.guaranteed:
            for name in clusters_of(state, waiting):
                there = [one for one in state.jobs if one.granted and one.cluster == name]
                spare = sum(one.granted - one.min_workers for one in there if not one.is_leaving)
                free = sum(node.cpus for node in cluster if node.cluster == name)
                free -= sum(max(one.granted, one.held) for one in there)
                assert spare + free < waiting.min_workers or "would delay" in wait.reason
                if has_waited(waiting, NOW):
                    lenders = [one for one in borrowers(state, waiting) if one.cluster == name]
                    assert all(spare + free + one.min_workers < waiting.min_workers for one in lenders)


def clusters_of(state: MarketState, waiting: MarketJob) -> set[str]:
    """Those in which it may start."""
    names = {node.cluster for node in state.nodes} - waiting.excluded_clusters
    return names & {waiting.cluster} if waiting.cluster else names


def borrowers(state: MarketState, waiting: MarketJob) -> list[MarketJob]:
    """Jobs without which their project still has what is guaranteed to it, in minima."""
    found = []
    for one in state.jobs:
        project = state.projects.get(one.project) or state.projects.get("default") or Project(name="default")
        peers = [
            other
            for other in state.jobs
            if other.granted and (other.project == project.name or other.project not in state.projects)
        ]
        minima = sum(max(other.granted, other.held) if other.is_leaving else other.min_workers for other in peers)
        is_beyond = not project.guaranteed or minima - one.min_workers >= project.guaranteed
        if one.granted and not one.is_leaving and one.priority <= waiting.priority and is_beyond:
            found += [one] if one.project != waiting.project else []
    return found


def each_running_job_below_its_maximum_has_a_reason(state: MarketState) -> None:
    after = carried_out(state, decide(state, NOW))
    answers = explain_held_back(after, NOW)
    assert all(one.reason.endswith(".") for one in answers)
    running = [one for one in after.jobs if one.granted and not one.is_leaving]
    assert Counter(one.job_id for one in answers) == Counter(
        one.job_id for one in running if one.granted < one.max_workers
    )


def no_job_spans_clusters(state: MarketState) -> None:
    """Each cluster holds its jobs, by CPUs and GPUs and by those nodes that they may use."""
    after = carried_out(state, decide(state, NOW))
    for name in {node.cluster for node in state.nodes}:
        there = [one for one in after.jobs if one.granted and one.cluster == name]
        usable = [node for node in state.nodes if any(may_use(one, node) for one in there)]
        assert sum(one.granted * one.need.cpus for one in there) <= sum(node.cpus for node in usable) + 1e-6
        assert sum(one.granted * one.need.gpus for one in there) <= sum(node.gpus for node in usable)
        for one in there:
            alone = sum(int(node.cpus / one.need.cpus) for node in state.nodes if may_use(one, node))
            assert one.granted <= alone


def jobs_start_only_where_they_may(state: MarketState) -> None:
    by_id = {one.job_id: one for one in state.jobs}
    names = {node.cluster for node in state.nodes}
    for one in decide(state, NOW):
        if isinstance(one, Start):
            old = by_id[one.job_id]
            assert one.cluster in names - old.excluded_clusters
            assert old.cluster in ("", one.cluster)


def no_decision_moves_a_running_job(state: MarketState) -> None:
    after = {one.job_id: one for one in carried_out(state, decide(state, NOW)).jobs}
    for one in state.jobs:
        if one.granted and after[one.job_id].granted:
            assert after[one.job_id].cluster == one.cluster


def a_job_that_some_cluster_has_room_for_starts(state: MarketState) -> None:
    """On one kind of worker and node and without limits: a job waits only if its minimum fits beside what others keep
    in no cluster that it may use, or would delay a reserved start there."""
    state = of_one_kind(state)
    jobs = [replace(one, user="", project="p") for one in state.jobs]
    state = MarketState(jobs=jobs, nodes=state.nodes)
    decisions = decide(state, NOW)
    outcome = carried_out(state, decisions)
    for one in [one for one in decisions if isinstance(one, Wait)]:
        waiting = next(old for old in jobs if old.job_id == one.job_id)
        for name in clusters_of(state, waiting) if "would delay" not in one.reason else ():
            room = sum(int(node.cpus) for node in state.nodes if node.cluster == name)
            kept = [
                max(other.granted, other.held) if other.is_leaving else min(other.granted, other.min_workers)
                for other in outcome.jobs
                if other.granted and other.cluster == name
            ]
            assert room - sum(kept) < waiting.min_workers, one.reason


INVARIANTS = [
    there_is_one_decision_for_each_queued_job_and_at_most_one_for_a_running_one,
    workers_never_exceed_what_the_nodes_hold,
    no_limit_is_exceeded,
    no_job_is_below_its_minimum_or_above_its_maximum,
    only_lower_priorities_are_preempted_and_the_beneficiary_starts,
    repetition_changes_nothing,
    what_is_guaranteed_is_not_left_to_borrowers,
    jobs_that_were_preempted_settle_at_their_return,
    each_running_job_below_its_maximum_has_a_reason,
]


OF_SEVERAL_CLUSTERS = [
    *INVARIANTS,
    no_job_spans_clusters,
    jobs_start_only_where_they_may,
    no_decision_moves_a_running_job,
    a_job_that_some_cluster_has_room_for_starts,
]


def broken(invariants: list[Callable[[MarketState], None]], state: MarketState) -> dict[str, str]:
    return failed_cases(lambda holds: holds(state), invariants, lambda holds: holds.__name__)


@settings(max_examples=EXAMPLES, deadline=None, derandomize=True)
@given(markets())
def test_every_invariant_holds(state: MarketState) -> None:
    assert broken(INVARIANTS, state) == {}


@settings(max_examples=EXAMPLES, deadline=None, derandomize=True)
@given(clustered_markets())
def test_every_invariant_holds_with_several_clusters(state: MarketState) -> None:
    assert broken(OF_SEVERAL_CLUSTERS, state) == {}


@pytest.mark.matrix
@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(clustered_markets())
def test_every_invariant_holds_for_many_markets_of_several_clusters(state: MarketState) -> None:
    assert broken(OF_SEVERAL_CLUSTERS, state) == {}


@pytest.mark.matrix
@settings(max_examples=MANY_EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(markets())
def test_every_invariant_holds_for_many_markets(state: MarketState) -> None:
    assert broken(INVARIANTS, state) == {}


@pytest.mark.matrix
@pytest.mark.parametrize("part", range(5))
def test_repetition_changes_nothing_in_any_of_many_markets(part: int) -> None:
    """Also before the new workers are on their nodes, which the decision does not name."""
    for seed in range(part * MANY_EXAMPLES, (part + 1) * MANY_EXAMPLES):
        repetition_changes_nothing(random_market(Random(seed)))


def test_repetition_changes_nothing_where_jobs_share_without_quotas_and_priorities() -> None:
    jobs = [replace(BUSY, job_id=f"job-{at}", left=1000.0 * (at + 1), max_workers=2 + at) for at in range(12)]
    state = market(jobs, [MarketNode(node_id=f"node-{at}", cpus=8.0) for at in range(4)])
    after = carried_out(state, decide(state, NOW))
    assert sum(grants(after).values()) == 32
    assert decide(after, NOW) == [] and decide(after, NOW + 0.5) == [] and decide(after, NOW + 60) == []


@settings(max_examples=5, deadline=None, derandomize=True, phases=[Phase.generate])
@given(
    least=st.integers(1, 4), least_of_short=st.integers(1, 2), periods=st.integers(1, 6), every_s=st.integers(90, 200)
)
def test_no_job_starves_while_shorter_ones_of_its_priority_keep_arriving(
    least: int, least_of_short: int, periods: int, every_s: int
) -> None:
    """Only the jobs of the first hour may overtake a long one, however many follow. It starts once these have run."""
    num_cpus, curve, short_s = 4, ThroughputCurve((1,), (1.0,)), periods * every_s
    big = MarketJob(
        job_id="big", submitted_at=0.0, min_workers=least, max_workers=least, need=NEEDS[0], curve=curve, left=1e7
    )
    short = replace(big, min_workers=least_of_short, max_workers=least_of_short, left=float(short_s))
    of_first_hour_s = MAX_OVERTAKEN_S / every_s * short_s * least_of_short / num_cpus
    bound_s = max(MAX_OVERTAKEN_S, of_first_hour_s) + 2 * (short_s + every_s)
    alive: list[MarketJob] = [replace(short, job_id=f"before-{at}") for at in range(num_cpus)] + [big]
    for at in range(0, int(bound_s) + every_s, every_s):
        alive = [replace(one, left=(one.left or 0) - every_s * (one.granted > 0)) for one in alive]
        alive = [one for one in alive if (one.left or 0) > 0]
        alive.append(replace(short, job_id=f"short-{at:06}", submitted_at=float(at)))
        state = market(alive, [MarketNode(node_id="node", cpus=float(num_cpus))])
        after = carried_out(state, decide(state, float(at)), float(at))
        alive = list(after.jobs)
        if grants(after).get("big"):
            break
    assert grants(after).get("big") == least
    assert at <= bound_s


def test_a_job_whose_places_are_not_known_yet_leaves_the_others_theirs() -> None:
    """It is booked on the nodes that the more restricted job cannot use, so that nobody starts where it is."""
    flexible = MarketJob(job_id="flexible", submitted_at=0.0, min_workers=4, max_workers=4, need=NEEDS[0], priority=50)
    tied = replace(flexible, job_id="tied", priority=0, selector={"zone": "x"})
    late = replace(flexible, job_id="late", submitted_at=NOW, min_workers=1, priority=0)
    cluster = [MarketNode(node_id="a", cpus=4.0, labels={"zone": "x"}), MarketNode(node_id="b", cpus=4.0)]
    running = [replace(one, granted=4, held=4) for one in (flexible, tied)]
    known = [running[0], replace(running[1], on_nodes={"a": 4})]
    for jobs in (running, known):
        assert grants(carried_out(market([*jobs, late], cluster), decide(market([*jobs, late], cluster), NOW))) == {
            "flexible": 4,
            "tied": 4,
        }


def test_a_decision_that_looks_at_its_own_outcome_knows_where_its_workers_are() -> None:
    """The guaranteed job is admitted first. If its places were not known in the outcome, the older job could be booked
    there, and `late` would start where that one is."""
    curve = ThroughputCurve((1,), (1.0,))
    older = MarketJob(
        job_id="older", submitted_at=NOW - 9, min_workers=4, max_workers=4, need=NEEDS[0], curve=curve, left=1000.0
    )
    guaranteed = replace(older, job_id="guaranteed", submitted_at=NOW, project="own", capacity=CapacityKind.ON_DEMAND)
    late = replace(older, job_id="late", submitted_at=NOW, min_workers=1, max_workers=1, need=NEEDS[1])
    cluster = [
        MarketNode(node_id="node-0", cpus=3.0, is_spot=True),
        MarketNode(node_id="node-2", cpus=4.0),
        MarketNode(node_id="node-3", cpus=1.0),
    ]
    state = market([guaranteed, older, late], cluster, Project(name="own", guaranteed=1))
    workers_never_exceed_what_the_nodes_hold(state)
    assert grants(carried_out(state, decide(state, NOW))) == {"guaranteed": 4, "older": 4}
