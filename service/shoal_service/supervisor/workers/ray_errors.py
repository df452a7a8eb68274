"""What Ray says of a call to a worker, as the errors of `supervisor/protocols.py`. For `RayFleet` and `RayAgents`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from ray.exceptions import (
    ActorUnavailableError,
    ActorUnschedulableError,
    RayActorError,
    RayError,
    RuntimeEnvSetupError,
)

from shoal_service.supervisor.protocols import WorkerCallError, WorkerDied, WorkerUnavailable
from shoal_workers.contract.job import IncidentCause
from shoal_workers.version import VERSION

_IP = re.compile(r"\bip=([\w.:]+)")


@contextmanager
def worker_errors() -> Iterator[None]:
    """Ray's errors as those of `protocols`."""
    try:
        yield
    except ActorUnavailableError as error:
        raise WorkerUnavailable(first_line(error)) from error
    except RayActorError as error:
        raise WorkerDied(_death_words(error), _cause_of(error)) from error
    except ActorUnschedulableError as error:  # `only_on` names a node that Ray no longer has
        raise WorkerDied("the node on which the worker was to start is gone", IncidentCause.NODE_DIED) from error
    except RuntimeEnvSetupError as error:
        raise WorkerCallError(_setup_words(error)) from error
    except RayError as error:
        raise WorkerCallError(first_line(error)) from error


def first_line(error: RayError) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _setup_words(error: RuntimeEnvSetupError) -> str:
    """Ray's first line names no reason; the last one is the error itself, below its traceback."""
    lines = (error.error_message or "").strip().splitlines()
    return f"Ray could not set up the runtime environment: {lines[-1].strip() if lines else 'it names no reason'}"


def _death_words(error: RayActorError) -> str:
    """Ray's first line names no reason ("The actor died unexpectedly before finishing this task"). What it does know is
    in the lines below; the exit status is asked for afterwards, see `exit_words`."""
    words = str(error).lower()
    if _cause_of(error) is IncidentCause.NODE_DIED:
        return "Ray reports that the worker's node died"
    if "running low on memory" in words or "memory usage threshold" in words:
        return "the worker was killed by Ray: its node was running low on memory"
    if "creation task" in words:
        return _creation_words(str(error))
    if "intended" in words and "ray.kill" in words:
        return "the worker was killed through Ray (ray.kill)"
    return "the worker's process ended"


def _creation_words(text: str) -> str:
    """Its constructor raised, or its class could not be imported: Shoal's own code, in the release of that node."""
    node, lines = _IP.search(text), text.strip().splitlines()
    return (
        f"the worker could not be created{f' on {node[1]}' if node else ''}: {lines[-1].strip()} (its supervisor is "
        f"Shoal {VERSION}; install the same release on every node)"
    )


def _cause_of(error: RayActorError) -> IncidentCause:
    """Whether the worker died alone or with its node. Ray distinguishes the two in its message only."""
    words = str(error).lower()
    by_node = any(phrase in words for phrase in ("its node has died", "node was terminated", "node died"))
    return IncidentCause.NODE_DIED if by_node else IncidentCause.WORKER_DIED
