"""Packs a user's directory into a zip archive that is a pure function of its files: same files, same sha256.

Version control, caches and virtual environments are left out, and what a `.shoalignore` names. A symbolic link to a
file inside the directory is followed; a link that leads out of it is refused, since it may point to another user's
files. Called by the HTTP edge for a `working_dir` on the service's machine, and by the Python client for one on the
user's machine.

The patterns of a `.shoalignore` mean what they mean to git in a `.gitignore`:

    # a comment         data/        a directory of this name, anywhere
    *.pt                a name, anywhere
    /runs               only in the directory of the file; so is every pattern with an inner slash
    logs/**/raw         ** stands for any number of directories
    !keep.pt            not ignored after all; not inside a directory that is ignored

The packer asks for each directory before it descends, and does not enter an ignored one.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import stat
import struct
import time
import zipfile
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pathspec import GitIgnoreSpec
from pathspec.patterns.gitignore.spec import GitIgnoreSpecPattern

from shoal_service.core.quantities import count_text, size_text

MAX_ARCHIVE_BYTES = 64 << 20
MAX_FILES = 20_000
EXCLUDED_NAMES = frozenset(
    {".git", ".hg", ".svn", "__pycache__", ".venv", "venv", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".DS_Store"}
)
IGNORE_FILE = ".shoalignore"
_EXCLUDED_SUFFIXES = (".pyc", ".pyo")
_EPOCH = (1980, 1, 1, 0, 0, 0)
_NUM_LARGEST_NAMED = 5
_MAX_NAME_BYTES = 1024
_CHECK_S = 60.0
_PIECE_BYTES = 1 << 20
_ENTRY_SIGNATURE, _END_SIGNATURE, _LOCATOR_SIGNATURE = b"PK\x01\x02", b"PK\x05\x06", b"PK\x06\x07"
_ENTRY = struct.Struct("<28xHHH12x")
"""Layout of an entry of a zip's directory: the lengths of the three texts that follow it."""
_END = struct.Struct("<12xI4xH")
"""Layout of the end of a zip's directory: the directory's size, and that of the comment behind it."""
_LOCATOR_BYTES = 20
_OF_ZIP64 = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class CodeArchive:
    sha256: str
    data: bytes
    num_files: int
    num_bytes: int
    """Bytes of the files, unpacked."""
    num_ignored: int
    """Files and directories that `.shoalignore` has left out, without those inside of such a directory."""

    @property
    def words(self) -> str:
        """What was packed, for people: `3 files, 12.4 KiB (3.1 KiB packed)`."""
        ignored = f"; {IGNORE_FILE} leaves out {self.num_ignored}" if self.num_ignored else ""
        files = f"{count_text(self.num_files, 'file')}, {size_text(self.num_bytes)}"
        return f"{files} ({size_text(len(self.data))} packed){ignored}"


class CodeArchiveError(ValueError):
    """A directory cannot be packed, or an archive cannot be accepted; the message gives the reason."""

    code = "code_archive"


def pack(working_dir: str | Path, *, max_bytes: int = MAX_ARCHIVE_BYTES) -> CodeArchive:
    """Pack a directory.

    Raises:
        CodeArchiveError: not a directory, a link that leads out of it, too many files, or too large (the largest files
            are named).
    """
    root = Path(working_dir)
    if not root.is_dir():
        raise CodeArchiveError(f"code.working_dir {str(working_dir)!r} is not a directory on this machine.")
    try:
        files, num_ignored = _list_files(root)
        sizes = {name: path.stat().st_size for name, path in files.items()}
        _require_small(sizes, root, max_bytes)
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
            for name, path in files.items():
                archive.writestr(_make_entry(name, path), path.read_bytes())
    except OSError as error:
        raise CodeArchiveError(f"code.working_dir {str(working_dir)!r} cannot be read: {error}.") from error
    data = buffer.getvalue()
    return CodeArchive(hashlib.sha256(data).hexdigest(), data, len(files), sum(sizes.values()), num_ignored)


def check(sha256: str, data: bytes, *, within_s: float = _CHECK_S) -> None:
    """Verify an uploaded archive, which may be hostile. Takes some seconds, for 1 GiB of content, and never more than
    about `within_s`.

    Raises:
        CodeArchiveError: another sha256 than named, a damaged zip, too many or too large entries, a form that other
            programs may read in another way, no end within `within_s`, or an entry that is no ordinary file or
            directory below the archive's root.
    """
    actual = hashlib.sha256(data).hexdigest()
    if actual != sha256:
        raise CodeArchiveError(f"the body's sha256 is {actual}, not {sha256}.")
    try:
        _require_few(data)
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = archive.infolist()
            _require_bounded(entries, len(data))
            _require_plain(entries)
            damaged = _find_damaged(archive, entries, within_s)
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError, OSError, ValueError) as error:
        if isinstance(error, CodeArchiveError):
            raise
        raise CodeArchiveError(f"the body is not a valid zip archive: {error}.") from None
    if damaged is not None:
        raise CodeArchiveError(f"the entry {damaged!r} is damaged.")


def _require_few(data: bytes) -> None:
    """Read the directory before `zipfile` does, which takes half a kilobyte of memory for each entry.

    One form is accepted, so that `zipfile`, here and where the archive is unpacked, reads the same directory: it stands
    directly before its end, which is the last of the archive, and no record of ZIP64 stands between them.
    """
    end = data.rfind(_END_SIGNATURE)
    if end < 0 or len(data) < end + _END.size:
        raise CodeArchiveError("the body is not a valid zip archive: it has no directory.")
    size, num_comment_bytes = _END.unpack_from(data, end)
    if data.startswith(_LOCATOR_SIGNATURE, max(0, end - _LOCATOR_BYTES)) or size == _OF_ZIP64:
        raise CodeArchiveError(
            f"the archive is of the kind ZIP64, for more than {MAX_FILES} entries or 4 GiB. Pack it without."
        )
    if end + _END.size + num_comment_bytes != len(data):
        raise CodeArchiveError("the body is not a valid zip archive: something follows its end.")
    at = end - size
    for _ in range(MAX_FILES + 1):
        if at == end:
            return
        if at < 0 or at + _ENTRY.size > end or not data.startswith(_ENTRY_SIGNATURE, at):
            raise CodeArchiveError(
                "the body is not a valid zip archive: its directory has something else than entries."
            )
        at += _ENTRY.size + sum(_ENTRY.unpack_from(data, at))
    raise CodeArchiveError(f"the archive has more than {MAX_FILES} entries.")


def _require_bounded(entries: list[zipfile.ZipInfo], num_bytes: int) -> None:
    """Requires that the archive's size and what it declares bound the cost of reading all entries."""
    unpacked_bytes = sum(entry.file_size for entry in entries)
    if unpacked_bytes > 16 * MAX_ARCHIVE_BYTES:
        raise CodeArchiveError(f"the archive unpacks to {unpacked_bytes} bytes, more than 1 GiB.")
    if sum(entry.compress_size for entry in entries) > num_bytes:
        raise CodeArchiveError("the entries of the archive share their content; each needs its own.")
    for entry in entries:
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise CodeArchiveError(
                f"the entry {_shorten(entry.filename)!r} is neither stored nor deflated (method {entry.compress_type})."
            )


def _find_damaged(archive: zipfile.ZipFile, entries: list[zipfile.ZipInfo], within_s: float) -> str | None:
    """Find the first entry whose content differs from its checksum."""
    ends_mono = time.monotonic() + within_s
    for entry in entries:
        try:
            with archive.open(entry) as file:
                while True:
                    if time.monotonic() >= ends_mono:
                        raise CodeArchiveError(f"reading the archive took longer than {within_s:g} s; make it smaller.")
                    if not file.read(_PIECE_BYTES):
                        break
        except zipfile.BadZipFile:
            return entry.filename
    return None


def _require_plain(entries: list[zipfile.ZipInfo]) -> None:
    """Requires that every entry is a file or a directory with a name of its own, below the archive's root."""
    files: set[str] = set()
    folders: set[str] = set()
    for entry in entries:
        name = entry.filename
        shown = _shorten(name)
        parts = name.replace("\\", "/").removesuffix("/").split("/")
        path, kind = "/".join(parts), stat.S_IFMT(entry.external_attr >> 16)
        is_outside = name.startswith(("/", "\\")) or ".." in parts or ":" in parts[0]
        is_long = len(name.encode(errors="replace")) > _MAX_NAME_BYTES or any(
            len(part.encode()) > 255 for part in parts
        )
        problems = {
            "would be extracted outside of the archive's root": is_outside,
            f"has a name of more than {_MAX_NAME_BYTES} or 255 bytes": is_long,
            "has a name that not every file system has": "" in parts or "." in parts or not name.isprintable(),
            "is a link or a device; files and directories are allowed": kind not in (0, stat.S_IFREG, stat.S_IFDIR),
            "is there twice": path in files or (path in folders and not entry.is_dir()),
        }
        for problem, is_there in problems.items():
            if is_there:
                raise CodeArchiveError(f"the entry {shown!r} {problem}.")
        (folders if entry.is_dir() else files).add(path)
        folders.update("/".join(parts[:count]) for count in range(1, len(parts)))
    if both := files & folders:
        raise CodeArchiveError(f"the entry {min(both)[:100]!r} is a file and a directory.")


def _shorten(name: str) -> str:
    return name if len(name) <= 100 else f"{name[:100]}..."


def _list_files(root: Path) -> tuple[dict[str, Path], int]:
    """The regular files by their name in the archive, sorted, because the order must not depend on the file system; and
    how many files and directories were ignored."""
    inside = root.resolve()
    rules, num_ignored = _read_ignore_rules(root), 0
    archived: dict[str, Path] = {}
    for folder, subfolders, names in os.walk(root, followlinks=False):
        # a link to a directory is one, other than for git: who ignores `data/` means it, wherever the data are
        links = [name for name in subfolders if (Path(folder) / name).is_symlink()]
        kept = {name: Path(folder) / name for name in [*names, *subfolders] if name not in EXCLUDED_NAMES}
        for name, path in list(kept.items()):
            if rules.match_file(path.relative_to(root).as_posix() + ("/" if name in subfolders else "")):
                num_ignored += 1
                del kept[name]
        subfolders[:] = sorted(name for name in subfolders if name in kept)
        for name in names + links:
            if name not in kept or name.endswith(_EXCLUDED_SUFFIXES):
                continue
            path = kept[name]
            if path.is_symlink() and not path.resolve().is_relative_to(inside):
                raise CodeArchiveError(
                    f"{path.relative_to(root)} is a link to {path.resolve()}, outside of code.working_dir. "
                    f"Replace it by a copy, remove it, or name it in {IGNORE_FILE}."
                )
            if path.is_symlink() and path.is_dir():
                raise CodeArchiveError(
                    f"{path.relative_to(root)} is a link to a directory; replace it by a copy, or name it in "
                    f"{IGNORE_FILE}."
                )
            if path.is_file():
                archived[path.relative_to(root).as_posix()] = path
        if len(archived) > MAX_FILES:
            raise CodeArchiveError(
                f"code.working_dir {str(root)!r} has more than {MAX_FILES} files. Move data out of it, or name "
                f"directories that the job does not need in {IGNORE_FILE}."
            )
    return dict(sorted(archived.items())), num_ignored


def _read_ignore_rules(root: Path) -> GitIgnoreSpec:
    path = root / IGNORE_FILE
    try:
        return parse_ignore_rules(path.read_text(encoding="utf-8") if path.is_file() else "")
    except UnicodeDecodeError:
        raise CodeArchiveError(f"{path} is not UTF-8 text.") from None


def parse_ignore_rules(text: str) -> GitIgnoreSpec:
    """Read the lines of a `.shoalignore`, as git reads them."""
    patterns: list[GitIgnoreSpecPattern] = []
    for line in text.removeprefix("\ufeff").splitlines():
        with suppress(ValueError, re.error):  # a range that ends before it begins, for example; git matches nothing
            patterns += GitIgnoreSpec.from_lines([line]).patterns
    return GitIgnoreSpec(patterns)


def _require_small(sizes: dict[str, int], root: Path, max_bytes: int) -> None:
    total_bytes = sum(sizes.values())
    if total_bytes <= max_bytes:
        return
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:_NUM_LARGEST_NAMED]
    named = ", ".join(f"{name} ({size / 2**20:.1f} MiB)" for name, size in largest)
    raise CodeArchiveError(
        f"code.working_dir {str(root)!r} holds {total_bytes / 2**20:.1f} MiB; {max_bytes / 2**20:.0f} MiB are allowed. "
        f"Largest files: {named}. Move data out of the directory, or name what the job does not need in {IGNORE_FILE}."
    )


def _make_entry(name: str, path: Path) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name, _EPOCH)
    executable = bool(path.stat().st_mode & 0o100)
    entry.external_attr = (0o100755 if executable else 0o100644) << 16
    entry.create_system = 3
    entry.compress_type = zipfile.ZIP_DEFLATED
    return entry
