"""The base class of the parts of the client: the transport, and a GET whose answer is parsed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar
from urllib.parse import quote

from pydantic import BaseModel

from shoal_api.client.transport import Transport

M = TypeVar("M", bound=BaseModel)
JSON_CONTENT = {"Content-Type": "application/json"}


class Endpoint:
    """Sends requests to one service."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def _get(self, path: str, model: type[M], params: Mapping[str, Any] | None = None, wait_s: float = 0.0) -> M:
        response = self._transport.send("GET", path, params=params, wait_s=wait_s)
        return model.model_validate_json(response.content)


def job_path(job_id: str) -> str:
    return f"/v1/jobs/{quote(job_id, safe='')}"


def node_path(node_id: str) -> str:
    return f"/v1/nodes/{quote(node_id, safe='')}"
