"""The other end of the package `shoal`: what a script logs becomes step reports.

    script        shoal.log(step=17, loss=0.5)        a message on a local socket, at once
    this module   StepReport(step=17, ...)            on the training thread, into the outbox

Each process of the script that logs has a connection of its own. Reports are made of what rank 0 logs; the other ranks'
messages only show that they go on. Libraries log an evaluation after the step, under the same number: it becomes the
step's validation. Messages that event_files.py makes of TensorBoard's files are read here as well. Names and numbers of
metrics are limited as for a task; what is left out is said once in the job's log. Used by the runner on its training
thread.
"""

from __future__ import annotations

import json
import math
import secrets
import socket
from collections.abc import Callable
from typing import Any

from shoal.names import is_evaluation
from shoal_workers.contract import (
    MAX_METRICS,
    MAX_NAME_CHARS,
    Assignment,
    StepReport,
    ValidationReport,
    is_metric_name,
    suggested_name,
)
from shoal_workers.forkserver.launch import is_of_this_user

_LARGEST_MESSAGE = 1 << 16
_BACKLOG = 64
_HOOK = "shoal.log"


class HookSocket:
    """Where processes of the script connect. It has no file, so nothing is left of it when the worker dies."""

    def __init__(self) -> None:
        name = f"shoal-script-{secrets.token_hex(16)}"
        self.address = f"@{name}"
        """As the environment of the script has it: `@` stands for the zero byte of an abstract address."""
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.setblocking(False)
        self.listener.bind(f"\0{name}")
        self.listener.listen(_BACKLOG)

    def accept(self) -> socket.socket | None:
        """Return None if nobody waits, or the process is of another user."""
        try:
            connection, _ = self.listener.accept()
        except OSError:
            return None
        if not is_of_this_user(connection):
            connection.close()
            return None
        connection.setblocking(False)
        return connection

    def close(self) -> None:
        self.listener.close()


def receive(connection: socket.socket) -> dict[str, Any] | None:
    """Return the next message; {} if there is none now or it is none of the package's, None at the end of the
    connection."""
    try:
        data = connection.recv(_LARGEST_MESSAGE)
    except BlockingIOError:
        return {}
    except OSError:
        return None
    if not data:
        return None
    try:
        message = json.loads(data)
    except ValueError:
        return {}
    return message if isinstance(message, dict) else {}


class LoggedSteps:
    """Makes reports of the messages of one generation.

    Args:
        began_at: wall-clock time at which the script was started, seconds since the epoch.
        remark: called with sentences for the job's log.
    """

    def __init__(self, assignment: Assignment, began_at: float, remark: Callable[[str], None]) -> None:
        self._assignment = assignment
        self._remark = remark
        self._last: tuple[int, float] | None = None
        """Step and time of the message before."""
        self._began_at = began_at
        self._late: dict[str, float] = {}
        """Metrics that were logged after their step was reported, for the next report."""
        self._metric_names: set[str] = set()
        self._remarked: set[str] = set()
        self._source = _HOOK

    def report_of(self, message: dict[str, Any], source: str = _HOOK) -> StepReport | ValidationReport | None:
        """Return None for a step that was reported before, unless the message is its validation, and for a message
        that is none. `source`: what the job's log calls where the message is from."""
        self._source = source
        step, at = message.get("step"), message.get("at")
        if not isinstance(step, int) or step < 0 or not isinstance(at, float):
            return None
        for name in message.get("refused") or ():
            self._say(f"{source}: {name} is not a number, and is left out.")
        last_step, last_at = self._last or (step - 1, self._began_at)
        if step == last_step:
            return self._after(step, at, self._metrics(message.get("metrics"), step))
        if step < last_step:
            return None
        self._last = step, at
        return StepReport(
            generation=self._assignment.generation,
            step=step,
            at=at,
            loss=self._finite("loss", message.get("loss"), step),
            grad_norm=self._finite("grad_norm", message.get("grad_norm"), step),
            lr=self._finite("lr", message.get("lr"), step),
            tokens=_count(message.get("tokens")),
            step_s=max(0.0, at - last_at) / (step - last_step),
            world_size=self._assignment.world_size,
            metrics=self._take_late() | self._metrics(message.get("metrics"), step),
            total_steps=_count(message.get("total_steps")),
        )

    def _after(self, step: int, at: float, metrics: dict[str, float]) -> ValidationReport | None:
        """What was logged for a step whose report has gone."""
        losses = [name for name in metrics if is_evaluation(name) and name.lower().endswith("loss")]
        if not losses:
            self._late |= metrics
            return None
        loss = metrics.pop(losses[0])
        return ValidationReport(
            generation=self._assignment.generation,
            step=step,
            at=at,
            loss=loss,
            bits_per_byte=None,
            samples=0,
            metrics=metrics,
        )

    def _take_late(self) -> dict[str, float]:
        late, self._late = self._late, {}
        return late

    def _metrics(self, values: Any, step: int) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for name, value in values.items() if isinstance(values, dict) else ():
            if not is_metric_name(name):
                self._say(
                    f"{self._source}: {name!r} cannot name a metric: a name is a letter and at most "
                    f"{MAX_NAME_CHARS - 1} letters, digits and characters of _./- after it, for example "
                    f"{suggested_name(name)!r}."
                )
                continue
            if name not in self._metric_names and len(self._metric_names) >= MAX_METRICS:
                self._say(f"{self._source}: {name} is left out, because a job has at most {MAX_METRICS} metrics.")
                continue
            self._metric_names.add(name)
            number = self._finite(name, value, step)
            if number is not None:
                metrics[name] = number
        return metrics

    def _finite(self, name: str, value: Any, step: int) -> float | None:
        if not isinstance(value, (int, float)):
            return None
        if math.isfinite(value):
            return float(value)
        self._say(f"{self._source}: {name} is not finite, first at step {step}, and is left out there.", key=name)
        return None

    def _say(self, text: str, key: str = "") -> None:
        if (key or text) not in self._remarked:
            self._remarked.add(key or text)
            self._remark(text)


def _count(value: Any) -> int | None:
    return int(value) if isinstance(value, (int, float)) and math.isfinite(value) and value >= 0 else None
