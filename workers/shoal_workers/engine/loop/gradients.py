"""The gradients of a loop, summed over all ranks while the backward pass still runs. Hides when which part is sent.

    last backward    grad of p9 | p8 | p7 | p6 ...        each is copied into its bucket as it becomes ready
    bucket 0              [p9 p8] ~~~~ all-reduce ~~~~~~~~~~~~~|
    bucket 1                          [p7 p6] ~~~~ all-reduce ~~~~~~~~|
    update           the rest is sent | vote | all are waited for; `grad` of each parameter is a view of its bucket

When `backward` runs, it is not known yet whether the user's loop will call it once more, change `grad` by hand, or
update another optimizer. So what is sent early is a guess, and it is a copy: `grad` stays what autograd has made until
the update. There every rank says, in the vote, whether the copies are still right: the same tensors, of the same
version. If one rank says no, all ranks drop the sums and make them again from `grad`. A wrong guess costs time only.

No rank waits for ever, because the calls on the group of the gradients are the same on all ranks, in the same order:

- The group is used for nothing else, so collectives of the user's own cannot come in between.
- What is sent, and in which order, follows from the calls of `update` and `commit`, which all ranks make alike, and
  from votes, which have the same result on all ranks. An update sends all buckets of its optimizer in their order. How
  many of them were sent during the backward pass is each rank's own matter, because sending does not wait.
- Whether any may be sent early is agreed: the update at this place of the last step was of the same optimizer, and all
  ranks had found it quiet. If another update or the end of the step comes instead, all ranks first send the rest of
  the buckets that the agreement was about, and drop the sums.

An update is quiet if nothing touches `grad` between the last backward pass of a step and the update. This is tried out
once, by value, before anything is sent early. Later a version tells, which torch counts for all changes but those
through `grad.data`. These are found by value: of a large model a part of the gradients is compared in each update, and
the loop ends if it has begun to write so. A hook of the loop's own runs before the one that sends.

A bucket is always made of the same parameters in the same order, so the sums have the same bits whether they were sent
early or not. Sharded parameters are in none: FSDP2 sums their gradients (sharded.py). Called by `Run` on the training
thread; on a GPU, autograd calls the hooks on a thread of its own while that one waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from shoal_workers.engine.group.all_ranks import RankGrid
from shoal_workers.engine.group.gradient_buckets import GradientBuckets
from shoal_workers.engine.loop.sharded import plain_parameters

_MAX_MISSES = 3
"""Wrong guesses for an update, after which nothing is guessed for it any more."""
_MAX_IDLE_UPDATES = 32
"""Updates in a row in which no rank has used a parameter; then its zeros are not sent any more."""
_NUM_FLAGS = 3


@dataclass(slots=True)
class _OverlapPlan:
    """What is known of the update at one place of the step."""

    is_untouched: bool = False
    num_misses: int = 0


@dataclass(slots=True)
class _Plan:
    """What is known of the gradients of one optimizer."""

    optimizer: Optimizer
    buckets: GradientBuckets | None = None
    hooks: list[RemovableHandle] = field(default_factory=list)
    guesses: dict[int, _OverlapPlan] = field(default_factory=dict)
    """By the number of the update in its step."""


@dataclass(frozen=True, slots=True)
class _Update:
    plan: _Plan
    num_calls: int
    """Calls of `backward` between the update before and this one, on this rank."""


class Gradients:
    """The sums of one generation on one rank. `update` is

    sums.send(optimizer)        all is under way
    sums.flags()                this rank's numbers for the vote
    sums.finish(totals, ...)    the vote is counted: `grad` of each parameter has the mean
    """

    def __init__(self, ranks: RankGrid | None) -> None:
        """`ranks`: all of them, in groups for these sums only; None if there is one rank."""
        self._ranks = ranks
        self._plans: dict[int, _Plan] = {}
        self._now: list[_Update] = []
        """Updates of this step."""
        self._before: list[_Update] = []
        """Those of the last one."""
        self._num_calls = 0
        self._is_last_call = False
        self._active: GradientBuckets | None = None
        """What the hooks fill in this backward pass."""
        self.num_early = 0
        """Buckets that this rank has sent during backward passes."""
        self.order: Mapping[int, int] = {}
        """See `plain_parameters`."""

    def begin_backward(self, *, is_last_micro_batch: bool) -> None:
        self._num_calls += 1
        expected = self._expected()
        self._is_last_call = is_last_micro_batch and expected is not None and expected.num_calls == self._num_calls
        self._active = None
        if self._is_last_call and expected is not None and self._is_open():
            self._active = expected.plan.buckets
            if not all(map(_is_last, expected.plan.hooks)):
                self._hook(expected.plan)

    def end_backward(self) -> None:
        self._active = None
        expected = self._expected()
        if not self._is_last_call or expected is None or expected.plan.buckets is None:
            return
        guess = self._guess(expected.plan)
        if not guess.is_untouched and guess.num_misses < _MAX_MISSES:
            expected.plan.buckets.note()

    def send(self, optimizer: Optimizer) -> list[float]:
        """Sends what was not sent yet of an optimizer's gradients. Returns this rank's numbers for the vote, equally
        many on all ranks."""
        plan = self._plans.setdefault(id(optimizer), _Plan(optimizer))
        if (expected := self._expected()) is not None and expected.plan is not plan:
            self._drop_open()
        flags = [0.0] * _NUM_FLAGS
        if (buckets := plan.buckets) is not None:
            buckets.send()
            flags = [float(buckets.is_stale), float(not buckets.is_as_noted), float(not buckets.are_all_compared)]
        return [*flags, *(float(parameter.grad is not None) for parameter in self._parameters(optimizer))]

    def rewritten(self, optimizer: Optimizer) -> Tensor | None:
        """After `send`, for the vote: a bool scalar on the device, see `GradientBuckets.is_rewritten`. None if nothing
        can be."""
        buckets = self._plans[id(optimizer)].buckets
        return None if buckets is None else buckets.is_rewritten()

    def wait_for_sums(self, optimizer: Optimizer) -> list[Tensor]:
        """Returns what `finish` makes the gradients of, as far as that is known before the vote is counted."""
        buckets = self._plans[id(optimizer)].buckets
        if buckets is not None:
            buckets.wait_for_sums()
            return buckets.sums()
        if self._ranks is not None:
            return []
        return [parameter.grad for parameter in self._parameters(optimizer) if parameter.grad is not None]

    def finish(
        self, optimizer: Optimizer, totals: Sequence[float], num_rewritten: float, weight: float
    ) -> tuple[list[Tensor], bool]:
        """Called by all ranks with the sum of their numbers: makes `grad` the sum over all ranks, divided by `weight`.
        Returns the whole parameters that any rank has used; the others have no gradient. And whether their sums are
        those that `wait_for_sums` has returned."""
        plan = self._plans[id(optimizer)]
        parameters = self._parameters(optimizer)
        (num_stale, num_restless, num_in_turn), uses = totals[:_NUM_FLAGS], totals[_NUM_FLAGS:]
        if num_rewritten and num_in_turn:
            raise ValueError(
                "the loop writes to `grad.data` between run.backward() and run.update(), and did not do so in its "
                "second step. Gradients are sent during the backward pass, so such writes of the last steps may be "
                "lost. Write to `grad` itself, or use clip=."
            )
        used = [parameter for parameter, count in zip(parameters, uses, strict=True) if count]
        num_stale += num_rewritten
        self._learn(plan, is_stale=num_stale > 0, is_untouched=num_restless == 0)
        if self._ranks is None:
            if used:
                torch._foreach_div_([p.grad for p in used if p.grad is not None], weight)
            return used, True
        if plan.buckets is not None and num_stale:
            plan.buckets.begin()
            plan.buckets.send()
            plan.buckets.wait_for_sums()
        late = [parameter for parameter in used if plan.buckets is None or parameter not in plan.buckets]
        if plan.buckets is not None and len(used) == len(plan.buckets.parameters) and not late:
            plan.buckets.give(weight)  # as in nearly every step
            return used, not num_stale
        extra = GradientBuckets(late, self._ranks) if late else None
        if extra is not None:
            extra.send()
            extra.wait_for_sums()
        for buckets in (plan.buckets, extra):
            if buckets is not None:
                buckets.divide(weight)
                buckets.begin()
        for parameter in used:
            buckets = plan.buckets if plan.buckets is not None and parameter in plan.buckets else extra
            assert buckets is not None
            parameter.grad = buckets.sum_of(parameter)
        self._plan_anew(plan, parameters, used, extra)
        return used, False

    def end_step(self) -> None:
        """Called by all ranks at the end of each step."""
        self._drop_open()
        self._before, self._now, self._num_calls = self._now, [], 0

    def close(self) -> None:
        """The generation is over: nothing refers to the groups any more."""
        self._active, self._ranks = None, None
        for plan in self._plans.values():
            _remove(plan.hooks)
        self._plans, self._now, self._before = {}, [], []

    def _parameters(self, optimizer: Optimizer) -> list[Tensor]:
        return plain_parameters(optimizer, self.order)

    def _expected(self) -> _Update | None:
        """The update that comes next, if this step is like the last one."""
        number = len(self._now)
        return self._before[number] if number < len(self._before) else None

    def _guess(self, plan: _Plan) -> _OverlapPlan:
        return plan.guesses.setdefault(len(self._now), _OverlapPlan())

    def _is_open(self) -> bool:
        """Return whether buckets of the expected update may be under way on any rank. Equal on all ranks."""
        expected = self._expected()
        return expected is not None and expected.plan.buckets is not None and self._guess(expected.plan).is_untouched

    def _drop_open(self) -> None:
        """Another update than the expected one has come, or none."""
        expected = self._expected()
        if expected is None or not self._is_open():
            return
        buckets, guess = expected.plan.buckets, self._guess(expected.plan)
        assert buckets is not None
        buckets.send()
        buckets.wait_for_sums()
        buckets.begin()
        guess.is_untouched, guess.num_misses = False, guess.num_misses + 1

    def _learn(self, plan: _Plan, *, is_stale: bool, is_untouched: bool) -> None:
        expected, guess = self._expected(), self._guess(plan)
        if expected is not None and expected.plan is plan and plan.buckets is not None:
            if guess.is_untouched:
                guess.is_untouched = not is_stale
                guess.num_misses += is_stale
            elif guess.num_misses < _MAX_MISSES:
                guess.is_untouched = is_untouched
                guess.num_misses += not is_untouched
        self._now.append(_Update(plan, self._num_calls))
        self._num_calls = 0

    def _plan_anew(
        self, plan: _Plan, parameters: Sequence[Tensor], used: Sequence[Tensor], extra: GradientBuckets | None
    ) -> None:
        """Decides, on all ranks alike, which parameters the next update sends."""
        assert self._ranks is not None
        of_used = {id(parameter) for parameter in used}
        old = plan.buckets
        if old is not None:
            old.num_idle = [
                0 if id(p) in of_used else num + 1 for p, num in zip(old.parameters, old.num_idle, strict=True)
            ]
            if extra is None and max(old.num_idle, default=0) < _MAX_IDLE_UPDATES:
                return
        if old is None and extra is not None:
            plan.buckets = extra
        else:
            idle = dict(zip(map(id, old.parameters), old.num_idle, strict=True)) if old is not None else {}
            kept = [p for p in parameters if id(p) in of_used or idle.get(id(p), _MAX_IDLE_UPDATES) < _MAX_IDLE_UPDATES]
            plan.buckets = GradientBuckets(kept, self._ranks) if kept else None
        self._hook(plan)

    def _hook(self, plan: _Plan) -> None:
        """Send each gradient when it is ready: after the loop's own hooks, which may change it."""
        _remove(plan.hooks)
        for parameter in plan.buckets.parameters if plan.buckets is not None else ():
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(self._ready)  # type: ignore[no-untyped-call]
                plan.hooks.append(hook)

    def _ready(self, parameter: Tensor) -> None:
        if self._active is not None and parameter in self._active:
            self.num_early += self._active.take(parameter)


def are_any_used(totals: Sequence[float]) -> bool:
    """Return whether any rank has a gradient, by the sum of what `send` returns."""
    return any(totals[_NUM_FLAGS:])


def _is_last(hook: RemovableHandle) -> bool:
    hooks = hook.hooks_dict_ref()
    return hooks is not None and next(reversed(hooks), None) == hook.id


def _remove(hooks: list[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()
    hooks.clear()
