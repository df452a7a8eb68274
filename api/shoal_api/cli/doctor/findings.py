"""The doctor's findings, and the functions that judge measurements. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from shoal_service.core.quantities import size_text
from shoal_workers.contract.base import Frozen

GIB = 1024**3
OLDEST_PYTHON = (3, 11)
_WANTED = {"torch": "2.13", "ray": "2.60"}


class Verdict(StrEnum):
    OK = "ok"
    WARN = "warn"
    """It works, with a restriction."""
    FAIL = "fail"
    """Jobs cannot run here."""


class Finding(Frozen):
    """One line of the report."""

    check: str
    verdict: Verdict
    message: str
    hint: str = ""
    """What to do; empty if nothing is needed."""


def worst(findings: Iterable[Finding]) -> Verdict:
    order = [Verdict.OK, Verdict.WARN, Verdict.FAIL]
    return max((finding.verdict for finding in findings), key=order.index, default=Verdict.OK)


def judge_python(version: tuple[int, int], shown: str) -> Finding:
    if version < OLDEST_PYTHON:
        return Finding(
            check="python", verdict=Verdict.FAIL, message=f"Python {shown}", hint="Shoal needs 3.11 or newer"
        )
    return Finding(check="python", verdict=Verdict.OK, message=f"Python {shown}")


def judge_space(
    check: str, what: str, free_bytes: int, *, fail_below_gib: float, warn_below_gib: float, hint: str
) -> Finding:
    """Compare the free memory, disk or shared memory with two limits."""
    message = f"{size_text(free_bytes)} free {what}"
    if free_bytes < fail_below_gib * GIB:
        return Finding(
            check=check, verdict=Verdict.FAIL, message=message, hint=f"{hint} (needs {fail_below_gib:g} GiB)"
        )
    if free_bytes < warn_below_gib * GIB:
        return Finding(check=check, verdict=Verdict.WARN, message=message, hint=hint)
    return Finding(check=check, verdict=Verdict.OK, message=message)


def judge_library(name: str, version: str | None, problem: str) -> Finding:
    """`version` of a library that was imported in a separate process; None if the import failed."""
    desired = _WANTED[name]
    if version is None:
        return Finding(
            check=name,
            verdict=Verdict.FAIL,
            message=f"{name} cannot be imported: {problem}",
            hint="install Shoal with its dependencies again: `make setup`, or `pip install shoal`",
        )
    if not f"{version}.".startswith(f"{desired}."):
        return Finding(
            check=name,
            verdict=Verdict.FAIL,
            message=f"{name} {version}",
            hint=f"Shoal needs {name} {desired}.x, because it uses internals that differ between versions",
        )
    return Finding(check=name, verdict=Verdict.OK, message=f"{name} {version}")


def judge_ray_auth(mode: str | None, token_source: str | None) -> Finding:
    """`token_source`: where a token was found. Ray 2.60 requires one to join a protected cluster."""
    if mode == "token" and token_source is None:
        return Finding(
            check="ray auth",
            verdict=Verdict.FAIL,
            message="RAY_AUTH_MODE=token, but there is no token",
            hint="set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH, or generate one: ray get-auth-token --generate",
        )
    if mode is None:
        return Finding(
            check="ray auth",
            verdict=Verdict.OK,
            message=f"RAY_AUTH_MODE is not set; token {'from ' + token_source if token_source else 'none'}",
            hint="for a protected cluster (serve --ray-address) set RAY_AUTH_MODE=token and the token's path",
        )
    return Finding(
        check="ray auth", verdict=Verdict.OK, message=f"RAY_AUTH_MODE={mode}, token {token_source or 'not needed'}"
    )
