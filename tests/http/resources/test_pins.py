"""Pins of checkpoints over REST and with the client."""

from collections.abc import Callable
from typing import Any

import pytest

from shoal_api.client.errors import ApiError
from shoal_service.views import CheckpointState, CheckpointView

NAME = "step-000000000010-a1-g1"
CHECKPOINT = CheckpointView(step=10, url=f"/c/{NAME}", state="committed", attempt=1, generation=1)


def test_a_checkpoint_is_pinned_and_unpinned_by_its_name(service: Any, supervise: Callable[..., str]) -> None:
    job_id = supervise(checkpoints=(CHECKPOINT,))
    assert service.client.pin_checkpoint(job_id, NAME).pinned
    assert [one.pinned for one in service.client.checkpoints(job_id)] == [True]
    assert not service.client.unpin_checkpoint(job_id, NAME).pinned
    assert [one.pinned for one in service.client.checkpoints(job_id)] == [False]


def test_what_cannot_be_pinned_is_named(service: Any, supervise: Callable[..., str]) -> None:
    job_id = supervise(checkpoints=(CHECKPOINT.model_copy(update={"state": CheckpointState.DELETED}),))
    for name, code in ((NAME, "checkpoint-conflict"), (NAME.replace("g1", "g2"), "checkpoint-not-found")):
        with pytest.raises(ApiError) as error:
            service.client.pin_checkpoint(job_id, name)
        assert error.value.code == code
