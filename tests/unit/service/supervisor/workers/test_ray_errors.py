"""What Ray says of a worker, in words that name the cause."""

import pytest
from ray.exceptions import ActorDiedError, RayActorError

from shoal_service.supervisor.protocols import WorkerDied
from shoal_service.supervisor.workers.ray_fleet import worker_errors
from shoal_workers.contract.job import IncidentCause
from shoal_workers.version import VERSION

_NOT_CREATED = """The actor died because of an error raised in its creation task, \
ray::WorkerActor.__init__() (pid=4242, ip=10.0.0.7, actor_id=85f5b70f)
  File "actor.py", line 80, in __init__
    self._meter = UseMeter(config.checkpoint_root)
TypeError: UseMeter.__init__() missing 1 required keyword-only argument: 'has_gpu'
"""


@pytest.mark.parametrize(
    ("said", "cause", "words"),
    [
        ("The actor died unexpectedly before finishing this task.", IncidentCause.WORKER_DIED, "process ended"),
        ("... died. Its node has died ...", IncidentCause.NODE_DIED, "the worker's node died"),
        (
            "1 worker(s) were killed due to the node running low on memory.",
            IncidentCause.WORKER_DIED,
            "running low on memory",
        ),
        (
            _NOT_CREATED,
            IncidentCause.WORKER_DIED,
            "the worker could not be created on 10.0.0.7: TypeError: UseMeter.__init__() missing 1 required "
            f"keyword-only argument: 'has_gpu' (its supervisor is Shoal {VERSION}; install the same release on every "
            "node)",
        ),
    ],
)
def test_the_words_name_the_cause(said: str, cause: IncidentCause, words: str) -> None:
    with pytest.raises(WorkerDied) as raised, worker_errors():
        raise RayActorError(None, said)
    assert words in str(raised.value) and raised.value.cause is cause


def test_an_error_without_words_has_some() -> None:
    with pytest.raises(WorkerDied) as raised, worker_errors():
        raise ActorDiedError()
    assert str(raised.value)
