"""The Python client of the REST API: `from shoal_api.client import Client`.

Inside: `Client` (one method per verb), the errors that it raises, the transport with its retries, streams and series.
Used by the `shoal` command, the demo and users' programs. Never imports the HTTP edge or the store.
"""

from shoal_api.client.client import Client
from shoal_api.client.errors import (
    ApiError,
    BadRequest,
    Conflict,
    Disconnected,
    Forbidden,
    InvalidSpec,
    NotFound,
    PreconditionFailed,
    ServerError,
    TooManyRequests,
    Unauthenticated,
    UntrustedServer,
    WaitTimeout,
)

__all__ = [
    "ApiError",
    "BadRequest",
    "Client",
    "Conflict",
    "Disconnected",
    "Forbidden",
    "InvalidSpec",
    "NotFound",
    "PreconditionFailed",
    "ServerError",
    "TooManyRequests",
    "Unauthenticated",
    "UntrustedServer",
    "WaitTimeout",
]
