"""Which directories and URLs a spec may name: only those below the allowed roots, with the allowed protocols.

Called at submit and by the check of a spec, with the server's settings. It keeps the built-in tasks, the checkpoints
and the packing of `code.working_dir` away from other places. It is no boundary for the code of a user's task, which
reads what its process may read.

`checkpoint.url` must also be one place for every process. A relative path means another directory in each of them, so
clients on the server's machine make it absolute before they submit, and the server refuses what is still relative.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from shoal_workers.contract.checks.spec_errors import SpecError, SpecProblem
from shoal_workers.contract.language_model import LM_TASK
from shoal_workers.contract.spec import JobSpec
from shoal_workers.contract.text_data import BYTE_TOKENIZER, PRETRAINED_TASKS

LOCAL = "file"
DEFAULT_PATHS = "/"
DEFAULT_PROTOCOLS = "file,s3,s3a,gs,gcs,az,abfs,abfss,hf,simplecache,filecache"
_WORKING_DIR = "code.working_dir"


class PipSource(StrEnum):
    NEVER = "never"
    WHEELS = "wheels"
    """Packages come only from the directory `code.wheels`."""
    INDEX = "index"
    """Packages come from `code.wheels`, or from the index for which pip is set up on the nodes."""


@dataclass(frozen=True, slots=True)
class AllowedPlaces:
    """What the server allows. By default everything local but the server's own directory, and object storage."""

    paths: tuple[str, ...] = (DEFAULT_PATHS,)
    """Absolute directories below which a spec may name paths."""
    protocols: frozenset[str] = frozenset(DEFAULT_PROTOCOLS.split(","))
    """Protocols that a spec may use, as in fsspec's URLs; `file` stands for local paths. `https://host` allows one host
    (with its port, if the URLs have one)."""
    pip: PipSource = PipSource.INDEX
    """Where `code.pip` may take packages from."""
    closed: tuple[str, ...] = ()
    """Directories of the server itself, which no spec may name."""
    opened: tuple[str, ...] = ()
    """Directories below the closed ones that a spec may name nevertheless."""

    def refusal(self, place: str, resolve: Callable[[str], str] = os.path.normpath) -> str:
        """Why a path or URL is not allowed, in words; empty: it is.

        Args:
            resolve: returns the absolute path that a local path means.
        """
        for link in place.split("::"):  # fsspec's chains: simplecache::s3://bucket/file
            protocol, separator, rest = link.partition("://")
            if not separator:
                is_word = "::" in place and link and "/" not in link
                protocol, rest = (link, "") if is_word else (LOCAL, link)
            host = f"{protocol}://{rest.partition('/')[0]}"
            if self.protocols.isdisjoint({protocol.lower(), host.lower()}):
                known = ", ".join(sorted(self.protocols)) or "none"
                return f"the protocol {protocol} is not allowed on this server (SHOAL_ALLOWED_PROTOCOLS: {known})"
            if protocol.lower() == LOCAL and rest and (message := self._refusal_of_path(rest, resolve)):
                return message
        return ""

    def _refusal_of_path(self, path: str, resolve: Callable[[str], str]) -> str:
        # as written and with its links resolved: neither may lead to a place that is not allowed
        resolved = {os.path.normpath(path), resolve(path) if path.startswith("/") else os.path.normpath(path)}
        if any(
            _is_below(resolved_place, self.closed) and not _is_below(resolved_place, self.opened)
            for resolved_place in resolved
        ):
            return "it is in the server's own directory, which holds its database and its tokens"
        if "/" not in self.paths and not all(
            _is_below(resolved_place, self.paths) or _stays_inside(resolved_place) for resolved_place in resolved
        ):
            return f"it is below none of the directories that this server allows (SHOAL_ALLOWED_PATHS: {self.listed})"
        return ""

    @property
    def listed(self) -> str:
        return ", ".join(self.paths)

    def contains_closed(self, directory: str) -> bool:
        return any(_is_below(closed_place, (directory,)) for closed_place in self.closed)


EVERYWHERE = AllowedPlaces()


def check_places(spec: JobSpec, allowed: AllowedPlaces, resolve: Callable[[str], str] = os.path.normpath) -> None:
    """Raises SpecError with every place in the spec that is not allowed."""
    problems = list(_packages(spec, allowed.pip))
    for path, place in _places_of(spec):
        message = allowed.refusal(place, resolve)
        if not message and path == _WORKING_DIR and allowed.contains_closed(resolve(place)):
            message = "it contains the server's own directory, which holds its database and its tokens"
        if message:
            problems.append(SpecProblem(path=path, message=f"{path} {place!r}: {message}."))
    if problems:
        raise SpecError(tuple(problems))


def _packages(spec: JobSpec, allowed: PipSource) -> Iterator[SpecProblem]:
    if spec.code.pip and allowed is PipSource.NEVER:
        yield SpecProblem(
            path="code.pip",
            message="code.pip: this server does not install packages for jobs (SHOAL_ALLOW_PIP is never). Ask its "
            "operator, or put the modules into code.working_dir.",
        )
    elif spec.code.pip and allowed is PipSource.WHEELS and spec.code.wheels is None:
        yield SpecProblem(
            path="code.pip",
            message="code.pip: this server installs packages only from wheels (SHOAL_ALLOW_PIP is wheels). Name their "
            "directory in code.wheels.",
        )


def _places_of(spec: JobSpec) -> Iterator[tuple[str, str]]:
    places = {
        "checkpoint.url": spec.checkpoint.url,
        _WORKING_DIR: spec.code.working_dir if spec.code.archive is None else None,
        "code.wheels": spec.code.wheels,
        "init_from": spec.init_from,
        "continue_from.url": spec.continue_from.url if spec.continue_from is not None else None,
        **{f"secrets.{name}.file": source.file for name, source in spec.secrets.items()},
    }
    yield from ((path, place) for path, place in places.items() if place is not None)
    if spec.task not in (LM_TASK, *PRETRAINED_TASKS):
        return
    yield from _texts(spec.model, "model", ("path",))
    files = ("cache_dir", "tokenizer", "paths", "validation_paths", "folder", "validation_folder")
    yield from _texts(spec.data, "data", files)
    sources = spec.data.get("sources")
    for number, source in enumerate(sources if isinstance(sources, list | tuple) else ()):
        if isinstance(source, Mapping):
            yield from _texts(source, f"data.sources[{number}]", ("path",))


def _texts(section: Mapping[str, Any], name: str, keys: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for key in keys:
        value = section.get(key)
        for place in value if isinstance(value, list | tuple) else [value]:
            if isinstance(place, str) and place != BYTE_TOKENIZER:
                yield f"{name}.{key}", place


def _is_below(path: str, directories: tuple[str, ...]) -> bool:
    return any(path == directory or path.startswith(directory.rstrip("/") + "/") for directory in directories)


def _stays_inside(path: str) -> bool:
    """Return whether a path is relative and stays inside the directory of the job's code."""
    return not path.startswith(("/", "~", "..")) and path != ""


_FILE = "file://"


def is_relative(url: str) -> bool:
    """Return whether the meaning of a path depends on the process: on its working directory or, with `~`, on its
    user."""
    if "::" in url:
        return False
    path = url.removeprefix(_FILE)
    return "://" not in path and not path.startswith("/")


def absolute(url: str, base: Path) -> str:
    """Return the URL of the same place for every process of this machine.

    Args:
        base: directory from which a relative path starts.
    """
    if not is_relative(url):
        return url
    prefix = _FILE if url.startswith(_FILE) else ""
    return prefix + str((base / Path(url.removeprefix(_FILE)).expanduser()).resolve())


def check_checkpoint_url(spec: JobSpec) -> None:
    """Raises SpecError if `checkpoint.url` or `init_from` is relative."""
    if spec.init_from is not None and is_relative(spec.init_from):
        raise SpecError.at(
            "init_from",
            f"init_from {spec.init_from!r} is relative; give an absolute path or a URL that every node can reach",
        )
    url = spec.checkpoint.url
    if url is not None and is_relative(url):
        raise SpecError.at(
            "checkpoint.url",
            f"checkpoint.url {url!r} is relative, so each process would use another directory; give an absolute path "
            "or a URL with a scheme",
        )
