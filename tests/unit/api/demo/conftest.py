"""The incident of a killed worker, as the demo sees it."""

import pytest

from kit.views import incident_view
from shoal_service.views import IncidentView


@pytest.fixture
def incident() -> IncidentView:
    return incident_view(
        ranks=(2,), worker_ids=("w2",), at=0, to_workers=3, detect_s=0.03, recovery_s=1.5, steps_lost=1
    )
