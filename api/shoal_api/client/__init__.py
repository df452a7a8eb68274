"""The Python client of the REST API: `from shoal_api.client import Client`.

Inside: `Client` with one method per verb, the errors that it raises, and the transport with its retries and streams.
Used by the `shoal` command, the demo and users' programs. Never imports the HTTP edge or the store.
"""

from shoal_api.client.client import Client, JobsQuery
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
    "JobsQuery",
    "NotFound",
    "PreconditionFailed",
    "ServerError",
    "TooManyRequests",
    "Unauthenticated",
    "UntrustedServer",
    "WaitTimeout",
]
