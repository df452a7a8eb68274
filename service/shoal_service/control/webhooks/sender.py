"""Sender: one POST to a receiver. On the event loop. Follows no redirect, uses no proxy, reads no body of an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import httpx

_CONNECT_S = 5.0
_KEPT_ALIVE = 64


class Sender:
    """Close it after use."""

    def __init__(self, answer_s: float) -> None:
        """`answer_s`: seconds for a whole attempt, from the connection to the status of the answer."""
        self._answer_s = answer_s
        self._http = httpx.AsyncClient(
            follow_redirects=False,
            trust_env=False,  # neither proxies nor passwords from the environment
            timeout=httpx.Timeout(answer_s, connect=min(_CONNECT_S, answer_s)),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=_KEPT_ALIVE),
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
