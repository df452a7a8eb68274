"""The incident of a killed worker, as the demo sees it."""

import pytest

from shoal_service.views import IncidentView
from shoal_workers.contract.job import IncidentCause


@pytest.fixture
def incident() -> IncidentView:
    return IncidentView(
        id=1,
        cause=IncidentCause.WORKER_DIED,
        witness="ray",
        ranks=(2,),
        worker_ids=("w2",),
        generation=1,
        at=0,
        from_workers=4,
        to_workers=3,
        detect_s=0.03,
        recovery_s=1.5,
        steps_lost=1,
    )
