"""Choose where workers start, which of them form the next group, its layout, and who gets which rank. Pure.

`choose` decides about the next group:

    candidates    survivors in their order, standbys (warm workers beyond the grant) in the places of lost workers; as
                  many as are granted, or as are left: this is the world size, unless the layout uses fewer
    layout        planned for their number and for the nodes that they are on, or a rival that is to be measured
    rank order    so that the busiest axes do not leave a node
    memory        whether the workers of each machine fit into it, with snapshots and copies
    buddies       which worker keeps a copy of each rank's snapshots: on another machine, and in another rack if
                  there is one

tp communicates in every layer, cp and ep in every block, pp between stages, and the data axes once a step. Links inside
a node are the fastest, those inside a rack faster than those between racks. So a first group is filled rack by rack,
and each rack node by node: as many whole blocks as fit of the largest size, then of the next smaller one.

    pp2 x fsdp2 x tp2              rank   0   1 | 2   3 | 4   5 | 6   7
    node A has workers 0 to 3    worker   0   1 | 4   5 | 2   3 | 6   7
    node B has workers 4 to 7      node     A   |   B   |   A   |   B      both stages of a pipeline are on one node

A later group keeps the usual order while that lets no more tp groups cross nodes than necessary. Otherwise the tp
groups are given to nodes again. A node keeps the groups of which it has the most survivors, and each of these keeps its
rank.

    fsdp2 x tp2     before 0 1 | 2 3     worker 1 is lost; spares 8 on node B, 9 on node A
    node A: 0 1     usual  0 8 | 2 3     the first tp group would cross nodes
    node B: 2 3     so     0 9 | 2 3

Whole groups go to nodes first. Groups for which no node has enough workers are formed inside a machine if possible,
which may run several nodes, then inside a rack, and the rest across racks. The sizes divide each other, so this order
of choices never costs a whole group: no order of the candidates has fewer tp groups that cross nodes. Time:
O(n log n) for n workers.

What a group cannot start without is refused only if it exceeds a machine's memory by the error of predictions; copies
and the gradient log are only remarked, since workers do without them when there is no shared memory for them:

    8 workers on a machine of 14 GiB, process 0.3 GiB, each: training 1.2, snapshots 0.8
    0.3 + 8 x (1.2 + 0.8) = 16.3 GiB    refused: more than 14 GiB and a tenth
    0.3 + 7 x (1.2 + 0.8) = 14.3 GiB    not refused; copies that they keep for others are remarked

A rank whose shard is also trained on another machine needs no copy. On one machine no rank needs one: the memory
outlives each of its nodes, and a copy on it would not outlive the machine.

    machine A   machine B   machine C          ranks 0 1 | 2 | 3
    0 1         2           3                  0 -> 2    1 -> 3    2 -> 0    3 -> 1

The control plane names nodes that must not be used (a drain, a probation), and a worker reports that it will be taken
away (SIGTERM, a preemption notice). In both cases the group switches away from the worker at a step boundary, so no
step is lost.

`choose_node` prefers a node for a new worker, and Ray places the worker elsewhere if the node has no room by then.
`spread` takes the node with the fewest workers of the job. `pack` keeps the number of nodes small, and counts room in
blocks of tp workers, because a tp group has to be on one node:

    tp 2, room 3 on A and 4 on B, four workers are missing        B B B B     one node
    tp 2, room 3 on A and 3 on B, four workers are missing        A A B B     no tp group on two nodes
    tp 2, A holds 2 and has room for 2, B is empty, 1 missing     A           next to the others
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left, bisect_right, insort
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from heapq import heappop, heappush
from operator import attrgetter

from shoal_service.core.attempt.state import Attempt, AvoidedNode, Stage, Worker
from shoal_service.core.hardware_profile import GIB, Racks
from shoal_service.core.layout_plan import HostNeed, Plan, PlanLayout
from shoal_service.core.quantities import count_text
from shoal_workers.contract import Layout, Placement, SnapshotServer, WorkerInfo
from shoal_workers.contract.checks.legality import is_plain_by_default
from shoal_workers.contract.layout import ShardLevel


@dataclass(frozen=True, slots=True)
class Choice:
    planned: Plan
    levels: tuple[Layout, ...]
    """The planned layout and its rivals, see `switching`."""
    workers: tuple[Worker, ...]
    """Workers in rank order."""
    buddies: tuple[SnapshotServer | None, ...]
    """The worker that keeps a copy of each rank's snapshots, by rank; None if there is no copy."""
    refusal: str
    """Why the group cannot start: the memory that its workers need on a node; empty if it can start."""
    remark: str
    """Text that says that tp groups cross nodes, or that a node lacks memory for copies, and why; empty if neither."""


def choose(state: Attempt, usual: Sequence[Worker], now: float, plan: PlanLayout) -> Choice:
    """Choose the workers, the layout and the rank order of the next group. `usual`: its workers in the usual order; the
    layout may use fewer. Plain replicas that do not fit into the memory of the machines are followed by shards, if the
    spec leaves the choice to the planner."""
    known = {worker.index for worker in usual}
    spares = [worker for worker in candidates(state, now) if worker.index not in known]
    racks, refused = racks_of([*usual, *spares]), state.history.refused_layouts
    spec = state.target.spec
    best = plan(spec, len(usual), state.config.profile, racks, *([refused] if refused else []))
    choice = _choose_level(state, best, usual, spares)
    if choice.refusal and best.layout.shard is ShardLevel.NONE and is_plain_by_default(spec):
        sharded = plan(spec, len(usual), state.config.profile, racks, (*refused, best.layout))
        return _choose_level(state, sharded, usual, spares)
    return choice


def _choose_level(state: Attempt, best: Plan, usual: Sequence[Worker], spares: Sequence[Worker]) -> Choice:
    """Return the preferred layout of a plan, or its best one if the preferred one does not fit."""
    chosen = _preferred(state, best)
    choice = _placed(state, chosen, best, usual, spares)
    return _placed(state, best, best, usual, spares) if choice.refusal and chosen is not best else choice


def _preferred(state: Attempt, best: Plan) -> Plan:
    """Return the best layout, or the rival that is to be tried or is known to be faster. After an incident nothing is
    tried."""
    options = {planned.layout: planned for planned in (best, *best.rivals)}
    if state.history.trying in options and state.incident is None:
        return options[state.history.trying]
    return options[state.history.fastest_layout([*options])]


def _placed(state: Attempt, planned: Plan, best: Plan, usual: Sequence[Worker], spares: Sequence[Worker]) -> Choice:
    layout, family = planned.layout, tuple(planned.layout for planned in (best, *best.rivals))
    workers = {worker.index: worker for worker in (*usual, *(spares if layout.tp > 1 else ()))}
    # the processes of a script are new in each group: its ranks follow the nodes again, as torchrun numbers them
    previous = () if state.target.is_script else state.group.workers
    order = rank_order([_candidate(worker) for worker in workers.values()], previous, layout)
    chosen = tuple(workers[candidate.index] for candidate in order)
    infos = [worker.info for worker in chosen if worker.info is not None]
    by_rank = buddies(infos, layout) if state.target.keeps_snapshots else (None,) * len(infos)
    memory = memory_verdict(infos, by_rank, planned.host)
    remarks = filter(None, (_crossing(order, layout), memory.remark))
    return Choice(planned, family, chosen, by_rank, memory.refusal, "; ".join(remarks))


def _crossing(order: Sequence[Candidate], layout: Layout) -> str:
    crossing, num_groups = num_crossing([c.node for c in order], layout.tp), layout.world_size // layout.tp
    if not crossing:
        return ""
    return (
        f"{crossing} of {count_text(num_groups, 'tensor-parallel group')} across nodes, because the workers on the "
        f"nodes fill {count_text(num_groups - crossing, 'group')} of {layout.tp}"
    )


def _candidate(worker: Worker) -> Candidate:
    info = worker.info
    assert info is not None, "only usable workers are candidates, and they have described themselves"
    return Candidate(worker.index, info.node_id, machine_of(info), info.rack, info.slot)


def next_workers(state: Attempt, now: float) -> tuple[Worker, ...]:
    """Workers of the next group, at most as many as are granted, in the usual rank order. `choose` may take other
    candidates, and in another order, once the layout is known."""
    return _in_order(state, {p.index: p for p in candidates(state, now)})


def candidates(state: Attempt, now: float) -> list[Worker]:
    """Usable workers that may train, also more than are granted. Stragglers are taken only if the group is smaller
    without them. Workers that have to leave are taken only if the group would be below elasticity.min_workers without
    them, and not at all once their deadline has come. Those of a node that the open incident has made suspect count as
    such if the others are at least half of the group: the control plane is about to name the node, and the group would
    have to form again without them. With fewer others the group trains on until these are replaced."""
    order = state.group.ranks
    usable = sorted(state.usable, key=lambda p: (order.get(p.index, len(order)), p.index))
    incident_at = state.incident.at if state.incident is not None else math.inf
    suspected = {node_id for node_id, at in state.health.suspected.items() if at >= incident_at}
    leaving = leaving_nodes(state)
    num_usual = min(state.target.granted, sum(not has_to_leave(p, leaving) for p in usable))
    if 0 < num_usual <= 2 * sum(not has_to_leave(p, leaving | suspected) for p in usable):
        leaving |= suspected
    staying = [p for p in usable if p.leave is None and p.node_id not in leaving]
    chosen = [p for p in staying if p.slow_until is None]
    if len(chosen) < state.target.granted:
        chosen += [p for p in staying if p.slow_until is not None][: state.target.granted - len(chosen)]
    missing = min(state.target.min_workers, state.target.granted) - len(chosen)
    if missing > 0:
        stay = {p.index for p in staying}
        chosen += [p for p in usable if p.index not in stay and not is_due(state, p, now)][:missing]
    return chosen


def racks_of(workers: Iterable[Worker]) -> Racks:
    """How many of these workers each node has, by rack. Nodes whose rack is not known count as one rack."""
    racks: dict[str, Counter[str]] = defaultdict(Counter)
    for worker in workers:
        if worker.info is not None:
            racks[worker.info.rack][worker.info.node_id] += 1
    return tuple(tuple(nodes.values()) for nodes in racks.values())


def is_settled(state: Attempt, now: float) -> bool:
    """True if no further worker is waited for: none is missing, or none has become warm for a while. The first group
    waits longer than others."""
    workers, timeouts = state.workers, state.config.timeouts
    if len(workers) >= state.target.granted and all(worker.warm for worker in workers):
        return True
    newest = max((worker.warm_at or 0.0 for worker in workers if worker.warm), default=now)
    return now - newest >= (timeouts.gather_s if state.stage is Stage.STARTING else timeouts.settle_s)


def _in_order(state: Attempt, available: dict[int, Worker]) -> tuple[Worker, ...]:
    """Survivors keep their order, and the oldest standbys take the places of lost workers."""
    size = min(state.target.granted, len(available))
    ranks = state.group.ranks
    staying = set([index for index in state.group.workers if index in available][:size])
    spares = deque(sorted(index for index in available if index not in ranks)[: size - len(staying)])
    order = []
    for index in state.group.workers:
        if index in staying:
            order.append(index)
        elif spares and index not in available:
            order.append(spares.popleft())
    return tuple(available[index] for index in [*order, *spares])


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that may get a rank, and where it runs."""

    index: int
    node: str
    machine: str
    rack: str = ""
    """Rack of the node; empty if unknown. All candidates of an unknown rack count as one rack."""
    slot: int = -1
    """Number of its GPU on the node; -1 if it has none, or its number is not known."""


def rank_order(candidates: Sequence[Candidate], previous: Sequence[int], layout: Layout) -> tuple[Candidate, ...]:
    """The candidate of each rank, in rank order.

    candidates: at least layout.world_size, in the usual order: the first of them without regard to nodes.
    previous: indexes of the last group's workers, in rank order.
    """
    usual = tuple(candidates[: layout.world_size])
    if layout.world_size == layout.dp_shard and layout.ep == 1:
        return usual
    former = {index: rank for rank, index in enumerate(previous)}
    survives = any(candidate.index in former for candidate in candidates)
    if survives and num_crossing([c.node for c in usual], layout.tp) == fewest_crossing(candidates, layout):
        return usual
    return _TpGroupPlacement(
        candidates, {i: rank for i, rank in former.items() if rank < layout.world_size}, layout
    ).order()


def num_crossing(nodes: Sequence[str], tp: int) -> int:
    """Number of tp groups that are on several nodes. `nodes`: by rank."""
    return sum(len(set(nodes[first : first + tp])) > 1 for first in range(0, len(nodes), tp))


def fewest_crossing(candidates: Sequence[Candidate], layout: Layout) -> int:
    """The least number of tp groups that any order of the candidates leaves on several nodes."""
    inside = sum(size // layout.tp for size in Counter(c.node for c in candidates).values())
    return max(0, layout.world_size // layout.tp - inside)


PlaceOf = Callable[[Candidate], str]
_NODE, _MACHINE, _RACK = attrgetter("node"), attrgetter("machine"), attrgetter("rack")
_CLUSTER = ""


class _TpGroupPlacement:
    """Gives all tp groups to places: first to nodes, then to machines, to racks and to the whole cluster."""

    def __init__(self, candidates: Sequence[Candidate], former: dict[int, int], layout: Layout) -> None:
        self._layout = layout
        self._former = former
        """Rank of each worker in the last group, by worker index."""
        self._waiting = _neighbours_together(candidates)
        """Candidates without a rank: node by node, in each by slot, then in the usual order."""
        self._ranks: list[Candidate | None] = [None] * layout.world_size
        self._groups = layout.tp_groups_by_locality()
        """All tp groups; group g has the ranks from g * tp on."""
        self._position = {group: position for position, group in enumerate(self._groups)}
        self._open = self._groups
        """The tp groups that have no workers yet."""

    def order(self) -> tuple[Candidate, ...]:
        for place_of in (_NODE, _MACHINE, _RACK, lambda _: _CLUSTER):
            if self._open:
                self._fill(place_of, self._homes(place_of))
        return tuple(candidate for candidate in self._ranks if candidate is not None)

    def _homes(self, place_of: PlaceOf) -> dict[int, str]:
        """The place that has workers for all of a tp group, by number of the group; groups without such a place are
        left out."""
        tp, is_open = self._layout.tp, set(self._open)
        room = {place: size // tp for place, size in Counter(place_of(c) for c in self._waiting).items()}
        homes = self._homes_of_survivors(place_of, is_open, room)
        racks = {place_of(c): c.rack for c in self._waiting}
        room_of_rack: dict[str, dict[str, int]] = {}
        for place, number in room.items():
            room_of_rack.setdefault(racks[place], {})[place] = number
        totals = {rack: sum(rooms.values()) for rack, rooms in room_of_rack.items()}
        groups_of: dict[str, set[int]] = {rack: set() for rack in totals}
        for group, rack in self._in_blocks(is_open - homes.keys(), totals).items():
            groups_of[rack].add(group)
        for rack, rooms in room_of_rack.items():
            homes |= self._in_blocks(groups_of[rack], rooms)
        return homes

    def _homes_of_survivors(self, place_of: PlaceOf, groups: Set[int], room: dict[str, int]) -> dict[int, str]:
        """Give each of these tp groups the place where most of its survivors are. If several groups want one place,
        those that would keep the fewest survivors elsewhere come first. `room` is used up."""
        survivors: dict[int, Counter[str]] = defaultdict(Counter)
        for candidate in self._waiting:
            rank = self._former.get(candidate.index)
            if rank is not None and rank // self._layout.tp in groups:
                survivors[rank // self._layout.tp][place_of(candidate)] += 1
        homes: dict[int, str] = {}

        def dispensable(group: int) -> tuple[int, int]:
            most = [number for _, number in survivors[group].most_common(2)]
            return sum(most[1:]) - most[0], group

        for group in sorted(survivors, key=dispensable):
            home = next((place for place, _ in survivors[group].most_common() if room[place]), None)
            if home is not None:
                homes[group] = home
                room[home] -= 1
        return homes

    def _in_blocks(self, groups: Set[int], room: dict[str, int]) -> dict[int, str]:
        """Give each of these tp groups a place, as far as there is room, in blocks as large as possible. `room`: by
        place, in tp groups; it is used up."""
        homes: dict[int, str] = {}
        remaining = sorted(self._position[group] for group in groups)
        for size in self._layout.blocks():
            number_in = Counter(position // size for position in remaining)
            blocks = deque(block for block, number in number_in.items() if number == size)
            given = set()
            for place in room:
                while blocks and room[place] >= size:
                    given.add(block := blocks.popleft())
                    homes.update(dict.fromkeys(self._groups[block * size : (block + 1) * size], place))
                    room[place] -= size
            remaining = [position for position in remaining if position // size not in given]
        return homes

    def _fill(self, place_of: PlaceOf, homes: dict[int, str]) -> None:
        """Give each group that has a place workers from there: survivors on their ranks, then the others in order."""
        tp = self._layout.tp
        others: dict[str, deque[Candidate]] = defaultdict(deque)
        for candidate in self._waiting:
            rank = self._former.get(candidate.index)
            if rank is not None and homes.get(rank // tp) == place_of(candidate):
                self._ranks[rank] = candidate
            else:
                others[place_of(candidate)].append(candidate)
        for group in self._open:
            for rank in range(group * tp, group * tp + tp):
                if group in homes and self._ranks[rank] is None:
                    self._ranks[rank] = others[homes[group]].popleft()
        self._waiting = [candidate for remaining in others.values() for candidate in remaining]
        self._open = [group for group in self._open if group not in homes]


def _neighbours_together(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates sorted so that the nodes of a machine and the machines of a rack are together, each kind of place
    in the usual order; on a node by slot, because GPUs with neighbouring numbers often have the shorter path to each
    other."""
    racks, machines, nodes = ({place_of(c): None for c in candidates} for place_of in (_RACK, _MACHINE, _NODE))
    places = [{name: number for number, name in enumerate(names)} for names in (racks, machines, nodes)]
    return sorted(candidates, key=lambda c: (places[0][c.rack], places[1][c.machine], places[2][c.node], c.slot))


TOLERANCE = 1.1
"""A group is refused only if its predicted need exceeds the memory by this factor: predictions are off by up to a
tenth."""


@dataclass(frozen=True, slots=True)
class MemoryVerdict:
    refusal: str = ""
    """Why the group cannot start, with the numbers and the ways out; empty if it can, or the need is not known."""
    remark: str = ""
    """What the group lacks memory for while it trains; empty if nothing."""


def memory_verdict(
    workers: Sequence[WorkerInfo], buddies: Sequence[SnapshotServer | None], need: HostNeed
) -> MemoryVerdict:
    """Decide if the workers of each machine fit into its memory, by the machine with the least room.
    `workers`, `buddies`: by rank."""
    places = {(info.node_ip, info.snapshot_port): machine_of(info) for info in workers}
    kept = Counter(places.get((buddy.host, buddy.port), "") for buddy in buddies if buddy is not None)
    sending = Counter(machine_of(info) for info, buddy in zip(workers, buddies, strict=True) if buddy is not None)
    on_machine = Counter(machine_of(info) for info in workers)
    memory = {machine_of(info): info.memory_bytes for info in workers if info.memory_bytes}
    hosts = {machine_of(info): info.node_ip for info in workers}
    refusals: list[tuple[float, str]] = []
    remarks: list[tuple[float, str]] = []
    for machine, has in memory.items():
        number = on_machine[machine]
        alone = need.of(number)
        if alone > TOLERANCE * has:
            refusals.append((alone / has, _refusal(hosts[machine], has, number, need)))
        copies = sending[machine] * need.sent + kept[machine] * need.kept
        if copies and alone + copies > has:
            remarks.append(((alone + copies) / has, _remark(hosts[machine], has, number, kept[machine], need, copies)))
    return MemoryVerdict(max(refusals, default=(0, ""))[1], max(remarks, default=(0, ""))[1])


def _refusal(host: str, has: int, number: int, need: HostNeed) -> str:
    parts = {"training": need.training, "snapshots": need.snapshots}
    if need.build > need.training + need.snapshots:
        parts = {"the whole model, which each worker builds": need.build}
    fitting = max(0, int((TOLERANCE * has - need.process) // need.own))
    ways = [f"at most {count_text(fitting, 'worker')} on a node"] if fitting else []
    if "snapshots" in parts and need.of(number) - number * need.snapshots <= TOLERANCE * has:
        ways.append(f"snapshot.enabled: false, which saves {_gib(number * need.snapshots)}")
    if "snapshots" not in parts:
        ways.append("deferred_init = True in the task, so that no worker builds the whole model (docs/tasks.md)")
    else:
        ways.append("more workers on other nodes, so that each has a smaller part of the model")
    return (
        f"{host} has {_gib(has)} of memory, and {count_text(number, 'worker')} need {_gib(need.of(number))}: "
        f"process {_gib(need.process)} + {number} x "
        f"({' + '.join(f'{part} {_gib(size)}' for part, size in parts.items() if size)}). "
        f"Ways out: {'; '.join(ways)}"
    )


def _remark(host: str, has: int, number: int, num_kept: int, need: HostNeed, copies: int) -> str:
    return (
        f"{host} has {_gib(has)} of memory, and {count_text(number, 'worker')} with the copies that they send and keep "
        f"for {count_text(num_kept, 'rank')} of other nodes need {_gib(need.of(number) + copies)}"
    )


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= 0.05 * GIB else f"{num_bytes / (1 << 20):.0f} MiB"


def buddies(workers: Sequence[WorkerInfo], layout: Layout) -> tuple[SnapshotServer | None, ...]:
    """Endpoint of each rank's buddy, by rank; None where a copy is not needed, or no other machine has a worker that
    keeps snapshots.

    The ranks of the fullest machines choose first. Each takes the worker with the fewest copies; among equal ones the
    next along the ring of machines. What fails as a whole is often a rack: so a worker of another rack is preferred,
    as long as it gets at most one copy more. A choice takes logarithmic time.
    """
    machines = [machine_of(info) for info in workers]
    racks = {rack: number for number, rack in enumerate(dict.fromkeys(info.rack for info in workers))}
    rack_of = {machine: racks[info.rack] for machine, info in zip(machines, workers, strict=True)}
    ring = sorted(rack_of, key=lambda machine: rack_of[machine])
    place = {machine: number for number, machine in enumerate(ring)}
    crowd = Counter(machines)
    keepers = _RanksByCopies([rack_of[machine] for machine in ring])
    for rank, info in enumerate(workers):
        if info.snapshot_port != 0:
            keepers.put(0, place[machines[rank]], rank)
    chosen: list[SnapshotServer | None] = [None] * len(workers)
    for rank in sorted(lonely_ranks(layout, machines), key=lambda r: (-crowd[machines[r]], r)):
        other = keepers.take_elsewhere(place[machines[rank]])
        if other is not None:
            info = workers[other]
            chosen[rank] = SnapshotServer(node_id=info.node_id, host=info.node_ip, port=info.snapshot_port)
    return tuple(chosen)


class _RanksByCopies:
    """Keeps workers by the number of copies that they keep, then by machine, then by rank.

    `racks`: number of each machine's rack, rising.
    """

    def __init__(self, racks: Sequence[int]) -> None:
        self._racks = racks
        self._ranks: list[dict[int, list[int]]] = []
        """For each number of copies, the ranks of each machine as a heap."""
        self._machines: list[list[int]] = []
        """For each number of copies, the machines that have such ranks, in the order of the ring."""

    def put(self, copies: int, machine: int, rank: int) -> None:
        if copies == len(self._ranks):
            self._ranks.append({})
            self._machines.append([])
        if machine not in self._ranks[copies]:
            self._ranks[copies][machine] = []
            insort(self._machines[copies], machine)
        heappush(self._ranks[copies][machine], rank)

    def take_elsewhere(self, here: int) -> int | None:
        """Take a rank with the fewest copies that is on another machine, and count one copy more for it. None if there
        is none."""
        rack = self._racks[here]
        least = next((copies for copies, ring in enumerate(self._machines) if ring not in ([], [here])), None)
        if least is None:
            return None
        for copies in range(least, min(least + 2, len(self._machines))):
            elsewhere = _next_on_ring(self._machines[copies], bisect_right(self._racks, rack))
            if elsewhere is not None and self._racks[elsewhere] != rack:
                return self._take(copies, elsewhere)
        machine = _next_on_ring(self._machines[least], here + 1)
        assert machine is not None
        return self._take(least, machine)

    def _take(self, copies: int, machine: int) -> int:
        ring = self._machines[copies]
        rank = heappop(self._ranks[copies][machine])
        if not self._ranks[copies][machine]:
            del self._ranks[copies][machine]
            ring.remove(machine)
        self.put(copies + 1, machine, rank)
        return rank


def _next_on_ring(ring: Sequence[int], start: int) -> int | None:
    """Return the first machine from `start` on, or the first of all; None if the ring is empty."""
    return ring[bisect_left(ring, start) % len(ring)] if ring else None


def machine_of(info: WorkerInfo) -> str:
    """Identity of the worker's machine: equal for workers that share one memory."""
    return info.machine_id or info.node_id


def lonely_ranks(layout: Layout, machines: Sequence[str]) -> tuple[int, ...]:
    """One rank, the lowest, for each shard whose replicas are all on one machine. `machines`: by rank."""
    holders: dict[int, list[int]] = defaultdict(list)
    for rank in range(len(machines)):
        holders[layout.shard_of(rank)].append(rank)
    return tuple(sorted(ranks[0] for ranks in holders.values() if len({machines[rank] for rank in ranks}) == 1))


def find_leave(state: Attempt, worker: Worker) -> AvoidedNode | None:
    """Return why the worker has to leave, and its deadline; None if it may stay."""
    if worker.leave is not None:
        return worker.leave
    avoided = (node for node in state.target.avoided if node.node_id == worker.node_id and not node.keeps_workers)
    return next(avoided, None)


def is_due(state: Attempt, worker: Worker, now: float) -> bool:
    """True if the worker's deadline has come, less the time that a switch takes."""
    leave = find_leave(state, worker)
    return leave is not None and leave.deadline is not None and now >= leave.deadline - leave_margin_s(state)


def workers_to_leave(state: Attempt) -> list[Worker]:
    """List the workers of the group that must not stay in it, or stay only while there is no better one."""
    ranks, avoided = state.group.ranks, leaving_nodes(state)
    return [worker for worker in state.pool.workers if worker.index in ranks and has_to_leave(worker, avoided)]


def leaving_nodes(state: Attempt) -> frozenset[str]:
    """Nodes whose workers have to leave."""
    return frozenset(node.node_id for node in state.target.avoided if not node.keeps_workers)


def has_to_leave(worker: Worker, leaving: frozenset[str]) -> bool:
    """True if the worker has to leave: its node is in `leaving`, or it has given notice, or it is too slow."""
    return worker.node_id in leaving or worker.leave is not None or worker.slow_until is not None


def describe_leave(state: Attempt, worker: Worker) -> str:
    """Say for people why the group switches away from the worker."""
    leave = find_leave(state, worker)
    return f"drain {leave.node_id}: {leave.reason}" if leave is not None else f"replace straggler {worker.worker_id}"


def leave_margin_s(state: Attempt) -> float:
    """Seconds before the deadline at which the switch begins, even if no replacement is warm: two steps, or the grace
    of a script, and a margin."""
    if state.target.is_script:
        return state.config.timeouts.leave_margin_s + state.target.grace_s
    step_s = statistics.median(state.progress.step_times) if state.progress.step_times else 0.0
    return state.config.timeouts.leave_margin_s + 2 * step_s


@dataclass(frozen=True, slots=True)
class NodeRoom:
    """A node on which the worker may be."""

    node_id: str
    room: int
    """Number of further workers of this job that fit."""
    held: int = 0
    """Number of workers of this job that are there, or on their way."""


def choose_node(nodes: Sequence[NodeRoom], *, num_missing: int, tp: int, placement: Placement) -> str:
    """Return the id of the chosen node; empty if no node has room.

    Args:
        num_missing: workers that are about to be started, this one included.
        tp: workers of a tensor-parallel group.
    """
    roomy = [node for node in nodes if node.room > 0]
    if not roomy:
        return ""
    if placement is Placement.SPREAD:
        return min(roomy, key=lambda node: (node.held, -node.room, node.node_id)).node_id
    return min(roomy, key=lambda node: _order(node, num_missing, tp)).node_id


def _order(node: NodeRoom, num_missing: int, tp: int) -> tuple[int, int, int, str]:
    """Sort key of a node; the least is the best. First come nodes that complete a tp group, then those with room for a
    whole one, and of these the nodes of the job; then the node that takes most of the missing workers, and has the
    least room to spare."""
    begun = node.held % tp
    lacking = min(num_missing, tp - begun)
    if node.room < lacking:
        return 3, -min(num_missing, node.room), 0, node.node_id
    whole = (node.held + node.room) // tp * tp - node.held
    takes = min(num_missing, max(lacking, whole))
    return 0 if begun else 1 if node.held else 2, -takes, node.room - takes, node.node_id
