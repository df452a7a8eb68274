"""checkpoint.url must be one place for every process: a relative path means another directory in each of them.

Clients on the server's machine make it absolute before they submit; the server refuses what is still relative.
"""

from __future__ import annotations

from pathlib import Path

from shoal_workers.contract.checks.spec_errors import SpecError, SpecProblem
from shoal_workers.contract.spec import JobSpec

_FILE = "file://"


def is_relative(url: str) -> bool:
    """A local path whose meaning depends on the process: on its working directory or, with `~`, on its user."""
    if "::" in url:
        return False
    path = url.removeprefix(_FILE)
    return "://" not in path and not path.startswith("/")


def absolute(url: str, base: Path) -> str:
    """The same place for every process of this machine; `base`: what a relative path starts from."""
    if not is_relative(url):
        return url
    prefix = _FILE if url.startswith(_FILE) else ""
    return prefix + str((base / Path(url.removeprefix(_FILE)).expanduser()).resolve())


def check_checkpoint_url(spec: JobSpec) -> None:
    """Neither `checkpoint.url` nor `init_from` may be relative. Raises SpecError."""
    if spec.init_from is not None and is_relative(spec.init_from):
        message = f"init_from {spec.init_from!r} is relative; give an absolute path or a URL that every node can reach"
        raise SpecError((SpecProblem(path="init_from", message=message),))
    url = spec.checkpoint.url
    if url is not None and is_relative(url):
        message = (
            f"checkpoint.url {url!r} is relative, so each process would use another directory; "
            "give an absolute path or a URL with a scheme"
        )
        raise SpecError((SpecProblem(path="checkpoint.url", message=message),))
