"""What a script gets of another script's job that it continues: a copy of the files in that job's directory.

    checkpoints/job-A/last.pt   --copied once, before the first process starts-->   checkpoints/job-B/last.pt
                                                                                    checkpoints/job-B/.continued

The other job's files are only read. The mark is written last; a copy that was interrupted is made again, and no script
has run on half of it. What Shoal itself keeps in the directory stays behind.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from shoal_workers.checkpoint.local import TEMPORARY_SUFFIX
from shoal_workers.contract.media import FOLDER as MEDIA
from shoal_workers.contract.media import IMAGE_FILE, RecordName
from shoal_workers.contract.outputs import FOLDER as OUTPUTS

MARK = ".continued"
_STAGING = ".continuing"
NOT_OF_THE_SCRIPT = frozenset({MARK, _STAGING, OUTPUTS, "profiles", "tensorboard"})
_PIECE_BYTES = 16 * 1024**2


class NothingToContinue(Exception):
    """The message is for the user."""


def take_over(origin: Path, own: Path, *, job: str, progress: Callable[[str], None]) -> None:
    """Copy the files of job `job`, whose directory is `origin`, into `own`, unless that was done before.

    Args:
        own: the job's directory, which exists.
        progress: called with words again and again.

    Raises:
        NothingToContinue: that job has left no file.
        OSError: the storage.
    """
    if (own / MARK).exists():
        return
    names = sorted(name for name in _names(origin) - NOT_OF_THE_SCRIPT if not _is_of_media(origin / name))
    if not names:
        raise NothingToContinue(
            f"continue_from.job {job}: the job has left no file in {origin}, so there is nothing to go on from. Submit "
            "the job without continue_from (--from), or continue one that saves into SHOAL_CHECKPOINT_DIR."
        )
    staging = own / _STAGING
    _remove(staging)
    staging.mkdir()
    copied = 0

    def copy(source: str, target: str) -> str:
        nonlocal copied
        with Path(source).open("rb") as read, Path(target).open("wb") as write:
            while piece := read.read(_PIECE_BYTES):
                write.write(piece)
                copied += len(piece)
                progress(f"copied {copied / 2**20:.0f} MiB of what {job} has left")
            write.flush()
            os.fsync(write.fileno())
        shutil.copystat(source, target)
        return target

    for name in names:
        source = origin / name
        if source.is_dir() and not source.is_symlink():
            ignore = _records if name == MEDIA else None
            shutil.copytree(source, staging / name, symlinks=True, copy_function=copy, ignore=ignore)
        elif source.is_symlink():
            (staging / name).symlink_to(source.readlink())
        else:
            copy(str(source), str(staging / name))
    for name in names:
        _remove(own / name)  # of an earlier copy that did not come to its mark
        (staging / name).replace(own / name)
    staging.rmdir()
    (own / MARK).write_text(f"{job}\n", encoding="utf-8")


def _is_of_media(source: Path) -> bool:
    """It has only what the other job has logged; a script may keep files of its own in a folder of that name."""
    if source.name != MEDIA or not source.is_dir():
        return False
    names = sorted(_names(source))
    return len(_records("", names)) == len(names)


def _records(_: str, names: list[str]) -> list[str]:
    """Those that Shoal writes."""
    wholes = [name.removesuffix(TEMPORARY_SUFFIX) for name in names]
    return [
        name
        for name, whole in zip(names, wholes, strict=True)
        if RecordName.parse(whole) is not None or IMAGE_FILE.fullmatch(whole)
    ]


def _names(folder: Path) -> set[str]:
    try:
        return {entry.name for entry in folder.iterdir()}
    except FileNotFoundError:
        return set()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
