"""What Ray says of a supervisor, in the service's own errors, on which the driver decides."""

from __future__ import annotations

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, ActorUnschedulableError

from shoal_service.cluster.errors import SupervisorGone, SupervisorUnavailable
from shoal_service.gateway.supervisor_handle import supervisor_errors


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        (ActorDiedError(), SupervisorGone),
        (ActorUnschedulableError("worker startup repeatedly failed"), SupervisorGone),
        (ActorUnavailableError("no connection", b"0" * 16), SupervisorUnavailable),
    ],
)
def test_a_supervisor_is_gone_if_it_died_or_if_ray_could_not_start_it(said: Exception, meant: type[Exception]) -> None:
    with pytest.raises(meant), supervisor_errors():
        raise said
