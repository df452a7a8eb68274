"""Outputs between the directory of a job on this node and the job's storage.

    collect   the files that the program has written  ->  the folder of this node in the storage
    restore   what the storage has and this node has not, or has older  ->  the directory

Both follow no link: what is no regular file is not there. A file is written under a new name, then the manifest that
names it, then what no manifest names is removed; so a reader sees whole files of one moment each. A manifest of a newer
generation is never replaced. Files that were restored are no outputs of this node until the program changes them.
Decides nothing about when; `keeper` does.
"""

from __future__ import annotations

import errno
import hashlib
import heapq
import os
import stat
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shoal_workers.checkpoint.local import TEMPORARY_SUFFIX, LocalDirectory
from shoal_workers.checkpoint.storage import Directory, open_job_directory
from shoal_workers.contract.outputs import (
    FOLDER,
    MANIFEST,
    MAX_FILES,
    MAX_MANIFEST_BYTES,
    MAX_NAME_BYTES,
    OutputFile,
    OutputManifest,
    OutputsSpec,
    is_file_name,
    is_walked,
    matcher,
    merged,
)
from shoal_workers.descriptors import close_after
from shoal_workers.job_files.directory import DirectoryState, JobDirectory, Stamp, stamp_of

Note = Callable[[str], None]
_PIECE_BYTES = 8 << 20
_NUM_THREADS = 8
"""Files that are written at once: the time of a small one is that of the storage's answer."""
_SETTLED_S = 1.0
"""A file that was changed in the last second may be half written; it is collected the next time, or at the end. So is a
directory that has come into being, such as a checkpoint of several files, but no longer than the next seconds."""
_BEGUN_S = 60.0


@dataclass(frozen=True, slots=True)
class Writer:
    """Who collects: a node of a group."""

    node: int
    attempt: int
    generation: int


@dataclass(frozen=True, slots=True)
class Collected:
    manifest: OutputManifest
    clashes: tuple[str, ...] = ()
    """Files of this node whose names are taken by files of rank 0's node."""
    unnamed: str = ""
    """A file that is not kept because of its name."""


class Outputs:
    """The outputs of one job on this node. Every method holds the lock of the directory, on any thread, and raises
    OSError if the storage or the directory fails."""

    def __init__(self, directory: JobDirectory, checkpoint_root: str, spec: OutputsSpec) -> None:
        self._directory = directory
        self._storage = open_job_directory(checkpoint_root).child(FOLDER)
        self._spec = spec
        self._is_kept = matcher(spec.keep)

    def collect(self, writer: Writer, *, is_last: bool, note: Note) -> Collected | None:
        """Store what the program has written since the last call.

        Args:
            is_last: the program has ended, so no file is half written.

        Returns:
            What the storage has now; None if a newer generation has collected.
        """
        with self._directory.locked():
            place = self._storage.child(str(writer.node))
            before = read_manifests(self._storage, [writer.node]).get(writer.node)
            if before is not None and before.writer > (writer.attempt, writer.generation):
                return None
            known = {file.name: file for file in before.files} if before is not None else {}
            written = _Written(self._directory.state(), self._is_kept, known)
            newest = heapq.nlargest(MAX_FILES, written.among(regular_files(self._directory.path)), key=_changed_at)
            chosen = [*_up_to(self._spec.max_bytes, newest)]
            begun = {_folder(name) for name, _ in chosen} - {"", *map(_folder, known)}
            partial = set() if is_last else _half_written(begun, chosen)
            if chosen:
                place.create()

            def store(file: tuple[str, Stamp]) -> OutputFile | None:
                name, stamp = file
                pieces = _Pieces(lambda: note(f"keeping {name}"))
                try:
                    return self._stored(place, name, stamp, known.get(name), pieces, is_last=is_last)
                except FileNotFoundError:  # the program removes it, and the others of its directory
                    partial.update({_folder(name)} & begun)
                    return None

            with ThreadPoolExecutor(_NUM_THREADS, "shoal-outputs") as pool:
                stored = [*filter(None, pool.map(store, (file for file in chosen if _folder(file[0]) not in partial)))]
            files = sorted((f for f in stored if _folder(f.name) not in partial), key=lambda file: file.name)
            manifest = OutputManifest(
                directory=written.state.directory,
                attempt=writer.attempt,
                generation=writer.generation,
                files=tuple(files),
                num_left_out=written.num_files - len(chosen),
                bytes_left_out=written.num_bytes - sum(stamp[0] for _, stamp in chosen),
            )
            if manifest != before and (files or before is not None):
                place.create()
                place.write(MANIFEST, [manifest.model_dump_json().encode()])
                _remove_unnamed(place, manifest)
            return Collected(manifest, self._clashes(writer, manifest), written.unnamed)

    def restore(self, attempt: int, node: int | None, *, note: Note) -> int:
        """Bring the directory to what the storage has; a file that is newer here stays. Returns the number of files.

        Args:
            attempt: for which it is done; once for each attempt.
            node: the number that this node has in its group, if it is to go on from that node's files; None if all
                files of the job under their own names.
        """
        with self._directory.locked(note):
            state = self._directory.state()
            if node is None and state.restored_for == attempt:
                return 0
            manifests = read_manifests(self._storage, None if node is None else [node])
            others = {
                output.name: output
                for output in merged(manifests)
                if output.name == output.file.name and manifests[output.node].directory != state.directory
            }
            for name, stamp in regular_files(self._directory.path):
                if name in others and stamp[1] >= others[name].file.modified_ns:
                    del others[name]
            newer = others.values()
            restored = dict(state.restored_files)
            for done, output in enumerate(newer):
                note(f"restoring outputs of the job, {done} of {len(newer)}")
                copied = _fetch(self._storage.child(str(output.node)), output.file, self._directory.path)
                if copied is not None:
                    restored[output.name] = copied
            with suppress(OSError):  # said when there is something to store
                self._storage.create()
            if newer or attempt > state.restored_for:
                update = {"restored_files": restored, "restored_for": max(attempt, state.restored_for)}
                self._directory.put_state(state.model_copy(update=update))
            return len(newer)

    def _stored(
        self, place: Directory, name: str, stamp: Stamp, known: OutputFile | None, pieces: _Pieces, *, is_last: bool
    ) -> OutputFile | None:
        """Return the file as it is stored, now or before; None if it cannot be stored yet. FileNotFoundError if it has
        gone."""
        if known is not None and (known.bytes, known.modified_ns) == stamp:
            return known
        if not is_last and time.time_ns() - stamp[1] < _SETTLED_S * 1e9:
            return known
        content = uuid.uuid4().hex
        with _opened(self._directory.path, name) as descriptor:
            place.write(content, pieces.of_file(descriptor))
            status = os.fstat(descriptor)
        if stamp_of(status) != stamp and not is_last:
            place.remove(content)
            return known
        sha256 = pieces.digest.hexdigest()
        return OutputFile(
            name=name,
            bytes=pieces.num_bytes,
            modified_ns=stamp[1],
            sha256=sha256,
            content=content,
            is_executable=bool(status.st_mode & stat.S_IXUSR),
        )

    def _clashes(self, writer: Writer, manifest: OutputManifest) -> tuple[str, ...]:
        if not writer.node or not manifest.files:
            return ()
        first = read_manifests(self._storage, [0])
        hashes = {file.name: file.sha256 for file in first[0].files} if first else {}
        return tuple(f.name for f in manifest.files if hashes.get(f.name, f.sha256) != f.sha256)


def read_manifests(storage: Directory, nodes: Iterable[int] | None = None) -> dict[int, OutputManifest]:
    """Return the manifests in a job's folder of outputs by number of the node; those that cannot be read are left out.

    Args:
        nodes: to read; None means all.
    """
    if nodes is None:
        nodes = [int(name) for name in storage.directories() if name.isdecimal() and str(int(name)) == name]
    manifests: dict[int, OutputManifest] = {}
    for node in nodes:
        place = storage.child(str(node))
        try:
            if place.files().get(MANIFEST, 0) <= MAX_MANIFEST_BYTES:
                manifests[node] = OutputManifest.model_validate_json(place.read(MANIFEST), extra="ignore")
        except (FileNotFoundError, ValidationError):
            continue
    return manifests


def regular_files(top: Path) -> Iterator[tuple[str, Stamp]]:
    """Yield the regular files below a directory in which outputs are looked for; no link is followed."""
    for folder, subfolders, names, here in os.fwalk(top, follow_symlinks=False):
        below = Path(folder).relative_to(top)
        # What lies below a name that is too long cannot be kept, however deep it goes.
        subfolders[:] = [name for name in subfolders if is_walked(name) and len(str(below / name)) < MAX_NAME_BYTES]
        for name in names:
            with suppress(FileNotFoundError):
                status = os.stat(name, dir_fd=here, follow_symlinks=False)
                if stat.S_ISREG(status.st_mode) and not name.endswith(TEMPORARY_SUFFIX):
                    yield (below / name).as_posix(), stamp_of(status)


@dataclass(slots=True)
class _Written:
    """The files that the program has written and that the spec keeps, as they pass by."""

    state: DirectoryState
    is_kept: Callable[[str], bool]
    known: Mapping[str, OutputFile]
    """Those of this node in the storage; some were restored here."""
    num_files: int = 0
    num_bytes: int = 0
    unnamed: str = ""

    def among(self, files: Iterable[tuple[str, Stamp]]) -> Iterator[tuple[str, Stamp]]:
        for name, stamp in files:
            is_input = self.state.is_input(name, stamp) and (
                name not in self.known or stamp == self.state.code_files.get(name)
            )
            if is_input or not self.is_kept(name):
                continue
            if not is_file_name(name):
                self.unnamed = name
                continue
            self.num_files += 1
            self.num_bytes += stamp[0]
            yield name, stamp


def _folder(name: str) -> str:
    return name.rpartition("/")[0]


def _half_written(folders: set[str], files: Iterable[tuple[str, Stamp]]) -> set[str]:
    """Those of the new directories into which the program is writing. `files`: the newest first."""
    now, newest_at, oldest_at = time.time_ns(), dict[str, int](), dict[str, int]()
    for name, stamp in files:
        newest_at.setdefault(_folder(name), stamp[1])
        oldest_at[_folder(name)] = stamp[1]
    since_ns, begun_ns = now - int(_SETTLED_S * 1e9), now - int(_BEGUN_S * 1e9)
    return {folder for folder in folders if newest_at[folder] > since_ns and oldest_at[folder] > begun_ns}


def _changed_at(file: tuple[str, Stamp]) -> int:
    return file[1][1]


def _up_to(max_bytes: int, files: Iterable[tuple[str, Stamp]]) -> Iterator[tuple[str, Stamp]]:
    """Those of the files for which there is room, the first ones first."""
    for name, stamp in files:
        if stamp[0] <= max_bytes:
            max_bytes -= stamp[0]
            yield name, stamp


@contextmanager
def _opened(top: Path, name: str) -> Iterator[int]:
    """A descriptor of a regular file below `top`; what is reached over a link raises FileNotFoundError."""
    *folders, last = name.split("/")
    with LocalDirectory(top, tuple(folders)).open_descriptor() as here:
        try:
            descriptor = os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=here)
        except OSError as error:
            raise FileNotFoundError(error.errno, error.strerror, name) from None
    with close_after(descriptor):
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise FileNotFoundError(errno.ENOENT, "is no regular file", name)
        yield descriptor


@dataclass(slots=True)
class _Pieces:
    """A content that passes by, with its length and hash."""

    on_piece: Callable[[], None] = lambda: None
    num_bytes: int = 0
    digest: Any = field(default_factory=hashlib.sha256)

    def of_file(self, descriptor: int) -> Iterator[bytes]:
        while piece := os.read(descriptor, _PIECE_BYTES):
            yield self._seen(piece)

    def of_stored(self, place: Directory, file: OutputFile) -> Iterator[bytes]:
        """Raises ValueError at the end if it is not what the manifest says."""
        while self.num_bytes < file.bytes:
            buffer = bytearray(min(_PIECE_BYTES, file.bytes - self.num_bytes))
            count = place.read_into(file.content, self.num_bytes, memoryview(buffer))
            if not count:
                break
            yield self._seen(bytes(buffer[:count]))
        if self.digest.hexdigest() != file.sha256:
            raise ValueError(f"{file.name} in the job's storage is damaged")

    def _seen(self, piece: bytes) -> bytes:
        self.num_bytes += len(piece)
        self.digest.update(piece)
        self.on_piece()
        return piece


def _fetch(place: Directory, file: OutputFile, top: Path) -> Stamp | None:
    """Bring a stored file into the directory; None if it is not there any more, is damaged, or a link is in its way."""
    *folders, last = file.name.split("/")
    target = LocalDirectory(top, tuple(folders))
    try:
        target.create()
        target.write(last, _Pieces().of_stored(place, file))
        with _opened(top, file.name) as descriptor:
            os.fchmod(descriptor, 0o755 if file.is_executable else 0o644)
            os.utime(descriptor, ns=(file.modified_ns, file.modified_ns))
            return stamp_of(os.fstat(descriptor))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError):
        return None


def _remove_unnamed(place: Directory, manifest: OutputManifest) -> None:
    named = {MANIFEST, *(file.content for file in manifest.files)}
    for name in place.files():
        if name not in named:
            place.remove(name)
