"""Link: the gateway's requests to the service, over HTTP. Each makes one attempt, which `gateway.py` repeats, and fails
as `home.py` has it.
"""

from __future__ import annotations

import hashlib
import ssl
from typing import Any

import httpx

from shoal_service.clusters.wire import ClusterReport, OrderPage, ReportReceipt
from shoal_service.home import DialError, Unavailable, make_error

_CONNECT_S = 5.0
_ANSWER_S = 10.0
_ARCHIVE_S = 120.0
_MARGIN_S = 10.0
_WHOLE = 200
_NOT_VERIFIED = "CERTIFICATE_VERIFY_FAILED"


class Link:
    """Requests to one service, for one cluster. Used on one event loop; close it after use."""

    def __init__(self, url: str, token: str, cluster: str, verify: ssl.SSLContext | bool = True) -> None:
        self._base = f"/v1/clusters/{cluster}"
        self._http = httpx.AsyncClient(
            base_url=url.rstrip("/"),
            headers={"Authorization": f"Bearer {token}"},
            follow_redirects=False,
            trust_env=False,
            verify=verify,
            timeout=httpx.Timeout(_ANSWER_S, connect=_CONNECT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=8),
        )

    async def report(self, report: ClusterReport) -> ReportReceipt:
        """Sends a report. Raises DialError."""
        headers = {"Content-Type": "application/json"}
        answer = await self._ask("POST", "/reports", content=report.model_dump_json().encode(), headers=headers)
        return ReportReceipt.model_validate_json(answer.content)

    async def orders(self, life: str, after: int, wait_s: float) -> OrderPage:
        """Waits up to `wait_s` for an order above `after`. Raises DialError."""
        query: dict[str, str | int | float] = {"life": life, "after": after, "wait_s": wait_s}
        timeout = httpx.Timeout(wait_s + _MARGIN_S, connect=_CONNECT_S)
        answer = await self._ask("GET", "/orders", params=query, timeout=timeout)
        return OrderPage.model_validate_json(answer.content)

    async def archive(self, sha256: str) -> bytes:
        """Reads a code archive from the service; goes on where a connection broke. Raises DialError."""
        timeout, data, begun = httpx.Timeout(_ARCHIVE_S, connect=_CONNECT_S), bytearray(), -1
        while True:
            try:
                headers = {"Range": f"bytes={len(data)}-"}
                path = f"{self._base}/archives/{sha256}"
                async with self._http.stream("GET", path, headers=headers, timeout=timeout) as answer:
                    if answer.status_code >= 300:
                        await answer.aread()
                        raise _refusal(answer)
                    del data[0 if answer.status_code == _WHOLE else len(data) :]
                    begun = len(data)
                    async for piece in answer.aiter_bytes():
                        data += piece
                break
            except (httpx.HTTPError, ssl.SSLError) as error:
                if len(data) <= begun:  # nothing has come since the last break
                    cause = error or type(error).__name__
                    raise Unavailable(f"no answer from {self._http.base_url}: {cause}") from error
                begun = len(data)
        if hashlib.sha256(data).hexdigest() != sha256:
            raise Unavailable(f"the code archive {sha256} has arrived damaged")
        return bytes(data)

    async def close(self) -> None:
        await self._http.aclose()

    async def _ask(self, method: str, path: str, **request: Any) -> httpx.Response:
        try:
            answer = await self._http.request(method, self._base + path, **request)
        except (httpx.HTTPError, ssl.SSLError) as error:
            message = str(error) or type(error).__name__
            if _NOT_VERIFIED in message:
                message = f"the certificate of the service cannot be verified ({message}): see `shoal join --ca-file`"
            raise Unavailable(f"no answer from {self._http.base_url}: {message}") from error
        if answer.status_code < 300:
            return answer
        raise _refusal(answer)


def _refusal(answer: httpx.Response) -> DialError:
    return make_error(answer.status_code, _detail(answer), answer.headers.get("Retry-After", ""))


def _detail(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return f"{answer.request.url.copy_with(query=None)} has answered {answer.status_code}: is this a Shoal service?"
