"""Asks a server whether it is ready: one request without a token, which is not repeated."""

from __future__ import annotations

from shoal_api.answers import Readiness
from shoal_api.client.credentials import find_ca_file
from shoal_api.client.errors import ApiError
from shoal_api.client.fleet import Fleet
from shoal_api.client.transport import Credentials, RetryPolicy, Transport

_TIMEOUT_S = 5.0


def read_readiness(url: str) -> Readiness | str:
    """Return the readiness of a running server, or what it waits for. Raises Disconnected, InvalidURL."""
    no_token = Credentials(find_token=lambda: None, ca_file=find_ca_file())
    transport = Transport(url, _TIMEOUT_S, RetryPolicy(num_retries=0), no_token)
    try:
        return Fleet(transport).ready()
    except ApiError as error:
        problem = error.problem
        if problem.type == "about:blank":
            return f"a Shoal server (another program answers there, with status {problem.status})"
        return ", ".join(f"{item.path}: {item.message}" for item in problem.errors) or problem.detail
    except ValueError:
        return "a Shoal server (another program answers there)"
    finally:
        transport.close()
