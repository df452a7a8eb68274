"""The Python client: the REST API's verbs, typed. `from shoal_api.client import Client`."""

from shoal_api.client.client import Client
from shoal_api.client.errors import (
    ApiError,
    BadRequest,
    Conflict,
    Disconnected,
    InvalidSpec,
    NotFound,
    PreconditionFailed,
    ServerError,
    WaitTimeout,
)

__all__ = [
    "ApiError",
    "BadRequest",
    "Client",
    "Conflict",
    "Disconnected",
    "InvalidSpec",
    "NotFound",
    "PreconditionFailed",
    "ServerError",
    "WaitTimeout",
]
