"""Jobs of the tiny task on a real server, and what a test wants to know of one."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kit.processes.server import PATIENCE_S, until
from shoal_api.client import Client
from shoal_service.views import EventView, JobView
from shoal_workers.contract.job import JobState

TASKS = Path(__file__).parents[1] / "ray_tasks"
STACKED: dict[str, Any] = {
    "task": "stacked:Stacked",
    "plan": {
        "blocks": "blocks",
        "num_blocks": 4,
        "first": ["inlet"],
        "last": ["outlet"],
        "hidden_size": 12,
        "tensor": {"blocks.*.up": "column", "blocks.*.down": "row"},
        "widths": {"width of a block": 20},
    },
}
"""A task of four equal blocks that can be split by tp and pp."""


def holds(*steps: int) -> list[dict[str, Any]]:
    """Strikes that hold rank 0 in these steps."""
    return [{"at": "step", "rank": 0, "n": step, "do": "hold"} for step in steps]


@dataclass
class Run:
    """One job of the tiny task, and the directory of files at which its strikes wait."""

    client: Client
    job: JobView
    gate: Path
    reference: Callable[[], dict[int, float]]

    @property
    def id(self) -> str:
        return self.job.id

    def wait_at(self, name: str, *, with_service: bool = True) -> None:
        """Return when a hold or mark strike is reached. Fails if the service, when it runs, reports the end of the
        job."""
        reached = self.gate / f"{name}.reached"
        until(lambda: reached.exists() or (with_service and self._ended()), f"{self.id} reaches {name}", 240)
        assert reached.exists(), self.now().status

    def release(self, name: str) -> None:
        (self.gate / f"{name}.go").touch()

    def now(self) -> JobView:
        return self.client.job(self.id)

    def _ended(self) -> bool:
        return self.now().status.state.ended

    def wait_for(self, state: JobState) -> JobView:
        job = self.client.wait(self.id, until=[state], timeout_s=PATIENCE_S)
        assert job.status.state is state, job.status
        return job

    def finish(self, state: JobState = JobState.SUCCEEDED) -> JobView:
        job = self.wait_for(state)
        events = list(self.client.events(self.id))
        assert [event.seq for event in events] == list(range(1, len(events) + 1)), "an event is missing"
        self.job = job
        return job

    def events(self, type_: str) -> list[EventView]:
        return [event for event in self.client.events(self.id) if event.type == type_]

    def incident_lines(self) -> str:
        """Its incidents as JSON, for the message of an assertion: pytest cuts other values off."""
        return "\n".join(incident.model_dump_json(exclude={"stacks"}) for incident in self.client.incidents(self.id))

    def wait_for_step(self, step: int) -> None:
        """Return when a step was reported to the service."""
        until(lambda: self.now().status.step >= step or self._ended(), f"{self.id} has done step {step}")
        assert self.now().status.step >= step

    def wait_for_event(self, type_: str, count: int = 1) -> EventView:
        """The `count`-th event of a type."""
        after, seen = 0, 0
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            page = self.client.events_page(self.id, after=after, wait_s=5.0)
            for event in page.items:
                seen += event.type == type_
                if seen == count and event.type == type_:
                    return event
            assert page.items or not self._ended(), f"{type_} never came: {self.now().status}"
            after = page.next_after
        raise AssertionError(f"{count} {type_} did not come: {self.now().status}")

    def pids(self) -> dict[int, int]:
        """Pids of the group's workers, ordered by rank. Waits until the service knows them: a worker may hold
        at a step before that."""
        until(lambda: bool(self._pids()) or self._ended(), f"the service knows the workers of {self.id}")
        return self._pids()

    def _pids(self) -> dict[int, int]:
        return {worker.rank: worker.pid for worker in self.client.workers(self.id) if worker.rank is not None}

    def world_sizes(self) -> list[int]:
        return [event.data["workers"] for event in self.events("generation.formed")]

    def losses(self) -> dict[int, float]:
        return {point.step: point.loss for point in self.client.series(self.id)}

    def assert_undisturbed_losses(self) -> None:
        """Every step is there, with the loss that a run without any accident has."""
        losses, reference, stop = self.losses(), self.reference(), self.job.spec.stop
        assert stop is not None and stop.steps is not None
        steps = stop.steps
        assert list(losses) == list(range(1, steps + 1))
        assert losses == pytest.approx({step: reference[step] for step in losses}, rel=1e-5, abs=1e-6)


@dataclass
class Submit:
    """`submit(workers=3, strikes=[...], **spec)`: a job of the tiny task; `to`: another service than the session's."""

    client: Client
    directory: Path
    reference: Callable[[], dict[int, float]]
    runs: list[Run] = field(default_factory=list)

    def __call__(
        self, *, to: Client | None = None, reference: Callable[[], dict[int, float]] | None = None, **settings: Any
    ) -> Run:
        """`reference`: the undisturbed losses of another optimizer than the tiny task's."""
        gate = self.directory / f"gate-{len(self.runs)}"
        gate.mkdir()
        self.runs.append(submit_tiny(to or self.client, gate, reference or self.reference, **settings))
        return self.runs[-1]

    def cancel_all(self) -> None:
        for run in self.runs:
            if not run.job.status.state.ended and not run.now().status.state.ended:
                run.client.cancel(run.id)
                run.client.wait(run.id, timeout_s=PATIENCE_S)


def submit_tiny(
    client: Client,
    gate: Path,
    reference: Callable[[], dict[int, float]],
    *,
    workers: int = 2,
    min_workers: int = 1,
    steps: int = 20,
    strikes: list[dict[str, Any]] | None = None,
    step_s: float = 0.0,
    waves: Sequence[int] | None = None,
    holds: list[dict[str, Any]] | None = None,
    data_more: dict[str, Any] | None = None,
    code_more: dict[str, Any] | None = None,
    **spec: Any,
) -> Run:
    elasticity = {"min_workers": min_workers, "max_workers": workers, **spec.pop("elasticity", {})}
    document = {
        "name": "tiny",
        "task": "tiny:Tiny",
        "code": {"working_dir": str(TASKS), **(code_more or {})},
        "data": {
            "gate": str(gate),
            "strikes": strikes or [],
            "step_s": step_s,
            "waves": waves or [workers],
            "holds": holds or [],
            **(data_more or {}),
        },
        "batch": {"global_size": 10, "micro_size": 2},
        "optimizer": {"lr": 0.01},
        "schedule": {"name": "constant", "warmup_steps": 0},
        "stop": {"steps": steps},
        "elasticity": elasticity,
        "checkpoint": {"every_steps": 4},
        "snapshot": {"budget": 1.0},  # after each step, however short it is
        **spec,
        # a held worker waits for others, which may be slow; this must not count as a hang by default
        "health": {"hang_floor_s": 600.0, **spec.get("health", {})},
    }
    return Run(client, client.submit(document), gate, reference)
