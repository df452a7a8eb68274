"""Sender: one POST to a receiver. On the event loop. Follows no redirect, uses no proxy, reads no body of an answer.

With rules it resolves the receiver's name itself and connects to an address that the rules allow, so that the address
that was checked is the one that is used, whatever the name server answers next.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping

import httpx

from shoal_service.core.webhooks.rules import WebhookRules, refused

_CONNECT_S = 5.0
_KEPT_ALIVE = 64


class Sender:
    """Close it after use."""

    def __init__(self, answer_s: float, rules: WebhookRules | None = None) -> None:
        """`answer_s`: seconds for a whole attempt, from the connection to the status of the answer. `rules`: for hooks
        of specs; None: for those of an administrator."""
        self._answer_s = answer_s
        self._http = httpx.AsyncClient(
            follow_redirects=False,
            trust_env=False,  # neither proxies nor passwords from the environment
            timeout=httpx.Timeout(answer_s, connect=min(_CONNECT_S, answer_s)),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=_KEPT_ALIVE),
            transport=None if rules is None else _Checked(rules),
        )

    async def post(self, url: str, headers: Mapping[str, str], body: bytes) -> str:
        """Empty: the receiver has accepted it, with a status of 200 to 299. Otherwise why not, in words without the
        URL."""
        try:
            async with asyncio.timeout(self._answer_s):
                async with self._http.stream("POST", url, headers=headers, content=body) as answer:
                    status = answer.status_code
        except (TimeoutError, httpx.TimeoutException):
            return f"has not answered within {self._answer_s:g} s"
        except httpx.ConnectError as error:
            return f"cannot be reached: {error}"
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, OSError) as error:
            return f"has broken the connection or the protocol ({type(error).__name__})"
        if 300 <= status < 400:
            return f"has answered {status}: redirects are not followed"
        return "" if 200 <= status < 300 else f"has answered {status}"

    async def close(self) -> None:
        await self._http.aclose()


class _Checked(httpx.AsyncBaseTransport):
    """Keeps no connection alive: two names of one address would share it, and only one was authenticated."""

    def __init__(self, rules: WebhookRules) -> None:
        self._rules = rules
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._inner = httpx.AsyncHTTPTransport(trust_env=False, limits=limits)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        url, host = request.url, request.url.host
        try:
            found = await asyncio.get_running_loop().getaddrinfo(
                host, url.port or (443 if url.scheme == "https" else 80), type=socket.SOCK_STREAM
            )
        except OSError as error:
            raise httpx.ConnectError(str(error), request=request) from error
        addresses = self._rules.usable(host, dict.fromkeys(str(address[0]) for *_, address in found))
        failed = httpx.ConnectError(refused(host), request=request)
        for address in addresses:
            request.url = url.copy_with(host=address)  # the header Host has the name
            request.extensions = {**request.extensions, "sni_hostname": host}
            try:
                return await self._inner.handle_async_request(request)
            except httpx.ConnectError as error:
                failed = error
        raise failed

    async def aclose(self) -> None:
        await self._inner.aclose()
