"""What a gateway's process gets at its start."""

from __future__ import annotations

import sys

from pydantic import Field, field_validator

from shoal_service.clusters.wire import DEFAULT_CLUSTER
from shoal_service.home import Home
from shoal_workers.contract.base import Frozen
from shoal_workers.contract.log_settings import LogSettings
from shoal_workers.contract.placing import CLUSTER_PATTERN, check_labels

COMMAND = (sys.executable, "-P", "-m", "shoal_service.gateway.process")


class GatewayConfig(Frozen):
    """Written to its standard input as one line of JSON."""

    url: str
    """Address of the service."""
    token: str
    """Token by which the service knows the cluster."""
    cluster: str = Field(DEFAULT_CLUSTER, pattern=CLUSTER_PATTERN)
    """The name under which it joins."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Labels of the cluster, added to those of its nodes."""
    ca: str = ""
    """Certificates in PEM that the service's one must come from; empty: the usual authorities."""
    is_same_machine: bool = False
    """The service is dialled at an address of this machine, and `ca` has its own certificate: its name is not
    checked."""
    ray_address: str
    """host:port of the Ray cluster, or auto."""
    home: Home = Home()
    """Where the supervisors of this cluster reach the service, without a token."""
    replaces: bool = False
    """It may take the name over from another Ray cluster, once that one is silent."""
    ends_with_input: bool = False
    """It ends with its standard input, and no signal ends it. Else SIGINT and SIGTERM do."""
    logs: LogSettings = LogSettings()

    @field_validator("labels")
    @classmethod
    def _labels(cls, labels: dict[str, str]) -> dict[str, str]:
        return check_labels(labels)
