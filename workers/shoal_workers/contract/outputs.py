"""Outputs of a job: the files that its program writes below its directory, and how they lie in the job's storage.

    <checkpoint.url>/<job id>/job-files/
        0/files.json        OutputManifest: names, sizes and hashes of the files of the node of rank 0
        0/3f2a...           the content of a file; its name says nothing
        1/files.json        the same of the second node of the group

Each node writes its folder alone. `merged` makes one list of them: the files of rank 0's node have their names; a file
of another node whose name is taken by other content lies below `node-N/`. The code of jobs can write anything into the
storage, so a manifest with a name that leads out of the directory is not read. Pure data: `job_files` writes, the
service reads.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from shoal_workers.contract.base import Frozen

FOLDER = "job-files"
MANIFEST = "files.json"
MAX_FILES = 10_000
"""Files of one node that are kept."""
MAX_MANIFEST_BYTES = 16 << 20
MAX_NAME_BYTES = 1024
_MAX_SEGMENT_BYTES = 240
"""File systems take 255, and a file that is being written has a longer name."""
_GIB = 1 << 30
_LEFT_OUT = "__pycache__"


def is_file_name(name: str) -> bool:
    """True for a path of plain segments: relative, printable, without `.`, `..`, empty and very long ones."""
    segments = name.split("/")
    sizes = [len(segment.encode(errors="replace")) for segment in segments]
    is_short = len(sizes) + sum(sizes) <= MAX_NAME_BYTES and max(sizes) <= _MAX_SEGMENT_BYTES
    return is_short and name.isprintable() and not {"", ".", ".."} & {*segments} and "\\" not in name


def _is_file_name(name: str) -> str:
    if not is_file_name(name):
        raise ValueError(f"{name[:80]!r} is not the name of a file below a job's directory.")
    return name


def _is_pattern(pattern: str) -> str:
    if not pattern.strip("/") or ".." in pattern.split("/") or not pattern.isprintable():
        raise ValueError(
            f'outputs.keep {pattern[:80]!r} is not a pattern of files below the job\'s directory, such as "*.pt" or '
            '"runs/**".'
        )
    return pattern


FileName = Annotated[str, AfterValidator(_is_file_name)]
Pattern = Annotated[str, Field(min_length=1, max_length=MAX_NAME_BYTES), AfterValidator(_is_pattern)]


class OutputsSpec(Frozen):
    """What is kept of the files that the program writes below its directory; see docs/files.md."""

    keep: tuple[Pattern, ...] = Field(("**",), max_length=64)
    """Patterns of the files to keep: `*.pt` means files with such a name in any directory, `runs/**` all files below
    runs; `**` is everything. Not kept: the job's code as it was sent, links, hidden directories, __pycache__. An empty
    list keeps nothing."""
    max_gib: float = Field(10.0, gt=0, le=1e6, allow_inf_nan=False)
    """GiB of each node that are kept. Beyond that, the newest files are."""

    @property
    def max_bytes(self) -> int:
        return int(self.max_gib * _GIB)


def matcher(patterns: Iterable[str]) -> Callable[[str], bool]:
    """Return the test whether a file's name matches one of the patterns. Its time is linear in the name's length."""
    parsed = [_parsed(pattern) for pattern in patterns]
    return lambda name: any(_matches(segments, name.split("/")) for segments in parsed)


_Segments = list[Callable[[str], Any] | None]
"""Tests of the directories and the name, in order; None stands for any number of directories."""


def _parsed(pattern: str) -> _Segments:
    text = pattern.strip("/") + ("/**" if pattern.endswith("/") else "")
    names = text.split("/") if "/" in text or text == "**" else ["**", text]
    segments: _Segments = [None if name == "**" else re.compile(fnmatch.translate(name)).match for name in names]
    return [*segments[:-1], re.compile(".").match, None] if segments[-1] is None else segments


def _matches(segments: _Segments, names: list[str]) -> bool:
    reached = {0}
    for name in names:
        for at in sorted(reached):
            while at < len(segments) and segments[at] is None:
                at += 1
                reached.add(at)
        before, reached = reached, set()
        for at in before:
            if at < len(segments):
                test = segments[at]
                if test is None:
                    reached.add(at)
                elif test(name):
                    reached.add(at + 1)
    return any(all(segment is None for segment in segments[at:]) for at in reached)


def is_walked(directory: str) -> bool:
    """False for a directory, by its own name, in which no outputs are looked for."""
    return not directory.startswith(".") and directory != _LEFT_OUT


class OutputFile(Frozen):
    """A file in the storage."""

    name: FileName
    """Path below the job's directory."""
    bytes: int = Field(ge=0)
    modified_ns: int
    """Time of its last change on its node, nanoseconds since the epoch."""
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    content: str = Field(pattern=r"^[0-9a-f]{32}$")
    """Name of the file with its content, in the folder of the manifest."""
    is_executable: bool = False


class OutputManifest(Frozen):
    """The files of one node."""

    directory: str
    """Identity of the directory on the node."""
    attempt: int
    generation: int
    files: tuple[OutputFile, ...] = Field((), max_length=MAX_FILES)
    num_left_out: int = 0
    """Files beyond `max_gib` or MAX_FILES."""
    bytes_left_out: int = 0

    @property
    def writer(self) -> tuple[int, int]:
        return self.attempt, self.generation


@dataclass(frozen=True, slots=True)
class MergedFile:
    """A file of a job under the name that users see."""

    name: str
    node: int
    file: OutputFile


def merged(manifests: Mapping[int, OutputManifest]) -> list[MergedFile]:
    """Return the files of all nodes, by name. `manifests`: by number of the node."""
    files: dict[str, MergedFile] = {}
    for node in sorted(manifests):
        for file in manifests[node].files:
            first = files.get(file.name)
            if first is None:
                files[file.name] = MergedFile(file.name, node, file)
            elif first.file.sha256 != file.sha256:
                name = f"node-{node}/{file.name}"
                while name in files:  # the program has made such a name itself
                    name = f"node-{node}/{name}"
                files[name] = MergedFile(name, node, file)
    return [files[name] for name in sorted(files)]
