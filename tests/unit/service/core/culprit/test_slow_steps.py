"""Slow-downs: when they are certain, and whom the times of all ranks suspect."""

from dataclasses import dataclass, field

import pytest

from shoal_service.core.culprit import Pace, SlowDown, step_done
from shoal_workers.contract.suspects import Resource
from shoal_workers.contract.worker_reports import StepReport

USUAL = {"compute": 0.1, "data": 0.01, "cpu_wait": 0.01, "saving": 0.0}


@dataclass
class Group:
    """Three ranks; `step` says what is unusual, by rank."""

    pace: Pace = field(default_factory=Pace)
    generation: int = 1
    steps: int = 0

    def step(self, step_s: float = 0.12, *, validating_s: float = 0.0, **ranks: dict[str, float]) -> SlowDown | None:
        self.steps += 1
        times = [USUAL | ranks.get(f"rank{rank}", {}) for rank in range(3)]
        report = StepReport(
            generation=self.generation,
            step=self.steps,
            at=0.0,
            loss=1.0,
            grad_norm=1.0,
            lr=0.1,
            tokens=1,
            step_s=step_s,
            world_size=3,
            compute_s=tuple(one["compute"] for one in times),
            data_s=tuple(one["data"] for one in times),
            cpu_wait_s=tuple(one["cpu_wait"] for one in times),
            saving_s=tuple(one["saving"] for one in times),
            validating_s=validating_s,
        )
        self.pace, found = step_done(self.pace, report)
        return found

    def train(self, count: int = 12) -> None:
        assert [self.step() for _ in range(count)] == [None] * count


@pytest.fixture
def group() -> Group:
    made = Group()
    made.train()
    return made


@pytest.mark.parametrize(
    ("times", "resource"),
    [
        ({"compute": 0.5, "cpu_wait": 0.39}, Resource.CPU),
        ({"compute": 0.5, "data": 0.41}, Resource.DATA),
        ({"compute": 0.5}, Resource.COMPUTE),
        ({"compute": 0.1, "saving": 0.4}, Resource.STORAGE),
    ],
)
def test_the_rank_whose_work_has_grown_is_suspected_and_the_reason_is_named(
    group: Group, times: dict[str, float], resource: Resource
) -> None:
    found = [group.step(0.52, rank1=times) for _ in range(4)]
    [slow] = [one for one in found if one is not None]
    assert slow.suspect is not None
    assert (slow.suspect.resource, slow.suspect.ranks) == (resource, (1,))
    assert slow.usual_s == pytest.approx(0.12) and slow.now_s == pytest.approx(0.52)
    assert slow.suspect.evidence[0].startswith("rank 1 ")


def test_work_that_has_grown_everywhere_suspects_no_rank(group: Group) -> None:
    slower = {"compute": 0.5, "cpu_wait": 0.4}
    found = [group.step(0.52, rank0=slower, rank1=slower, rank2=slower) for _ in range(4)]
    [slow] = [one for one in found if one is not None]
    assert slow.suspect is not None and (slow.suspect.resource, slow.suspect.ranks) == (Resource.CPU, ())


def test_if_only_the_waiting_has_grown_the_links_decide(group: Group) -> None:
    [slow] = [one for one in (group.step(0.52) for _ in range(4)) if one is not None]
    assert slow.suspect is None


def test_a_checkpoint_that_keeps_one_rank_is_named_at_its_first_step_and_once(group: Group) -> None:
    held = {"saving": 2.0}
    slow = group.step(2.1, rank2=held)
    assert slow is not None and slow.suspect is not None
    assert (slow.suspect.resource, slow.suspect.ranks) == (Resource.STORAGE, (2,))
    assert group.step(2.1, rank2=held) is None


@pytest.mark.parametrize("steps", [[0.17] * 40, [3.0, 0.12, 3.0, 0.12]], ids=["not 1.5 times as long", "single steps"])
def test_what_is_usual_on_a_busy_machine_is_no_slow_down(group: Group, steps: list[float]) -> None:
    assert [group.step(step_s) for step_s in steps] == [None] * len(steps)


def test_validation_and_the_first_steps_of_a_generation_do_not_count(group: Group) -> None:
    assert group.step(5.0, validating_s=4.9) is None and group.step(5.0, validating_s=4.9) is None
    group.generation = 2
    assert [group.step(5.0) for _ in range(2)] == [None, None]
    group.train()
    assert any(group.step(0.52) for _ in range(4)), "a slow-down is found in the new generation too"


def test_a_slow_down_is_named_again_after_it_has_ended(group: Group) -> None:
    for _ in range(2):
        assert sum(group.step(0.52) is not None for _ in range(6)) == 1
        group.train(3)


def test_another_fault_while_a_slow_down_lasts_is_named_too(group: Group) -> None:
    first = [group.step(0.52, rank1={"compute": 0.5}) for _ in range(30)]
    assert [one.suspect.ranks for one in first if one is not None and one.suspect is not None] == [(1,)]
    second = [group.step(0.92, rank1={"compute": 0.5}, rank2={"compute": 0.9}) for _ in range(20)]
    assert [one.suspect.ranks for one in second if one is not None and one.suspect is not None] == [(2,)]


def test_a_worker_of_an_older_release_has_no_times_and_accuses_nobody() -> None:
    pace = Pace()
    for step in range(30):
        report = StepReport(
            generation=1, step=step, at=0.0, loss=1.0, grad_norm=1.0, lr=0.1, tokens=1, step_s=1.0 + step, world_size=2
        )
        pace, found = step_done(pace, report)
        assert found is None
