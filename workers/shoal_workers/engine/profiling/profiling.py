"""Profiling: takes the profiles that are requested of one worker, between two step boundaries, without stopping it.

    control thread    request(generation, ...)
    training thread   boundary: start | step | step | step | boundary: stop         leave: the generation ends
    writer thread                                          digest, storage, Profiled

    <checkpoint.url>/<job id>/profiles/profile-000003/trace-rank0-g1.json.gz
                                                      memory-rank0-g1.json.gz

An error of a profile becomes its report; it never reaches the training. A profile that the end of its generation
interrupts is dropped, and the supervisor, which knows why, ends it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shoal_workers.checkpoint.storage import open_job_directory
from shoal_workers.contract.profiles import (
    FOLDER,
    Category,
    Profiled,
    ProfileFile,
    ProfileRequest,
    StepTimes,
    name_of,
    to_delete,
)
from shoal_workers.engine.process.outbox import Outbox
from shoal_workers.engine.process.position import Position
from shoal_workers.engine.profiling.digest import Digest

if TYPE_CHECKING:
    from shoal_workers.engine.profiling.recording import Recording

_log = logging.getLogger(__name__)
_DIGEST_S = 120.0
_PREFIX = "shoal-profile-"


class Profiling:
    """One per worker."""

    def __init__(self, root: str, outbox: Outbox, position: Position, *, has_gpu: bool) -> None:
        """`root`: URL of the job's checkpoint directory."""
        self._root = root
        self._outbox = outbox
        self._position = position
        self._has_gpu = has_gpu
        self._lock = threading.Lock()
        self._newest = 0
        self._requested: tuple[int, ProfileRequest] | None = None
        self._recording: Recording | None = None
        self._writer: threading.Thread | None = None

    def request(self, generation: int, request: ProfileRequest) -> None:
        """Control thread: profile this rank from the next step boundary of this generation. Idempotent: a number that
        was requested before is ignored."""
        with self._lock:
            if request.number > self._newest:
                self._newest = request.number
                self._requested = generation, request

    def boundary(self, generation: int, rank: int, data_s: Callable[[], float]) -> None:
        """Training thread, between two steps. `data_s`: seconds that it has spent on batches."""
        recording = self._recording
        if recording is not None:
            recording.end_step(self._position.step)
            if recording.is_complete:
                self._finish(recording, generation, rank, "")
        elif self._requested is not None:
            self._begin(generation, rank, data_s)

    def leave(self, generation: int, rank: int, *, is_clean: bool) -> None:
        """Training thread: the generation ends. Not clean: a step was interrupted, and the recording is dropped."""
        recording = self._recording
        if recording is None:
            return
        if not is_clean:
            self._recording = None
            with contextlib.suppress(Exception):  # whatever the profiler says, the interrupted step comes first
                recording.stop()
            return
        recording.end_step(self._position.step)
        done, wanted = len(recording.times), recording.request.steps
        note = "" if recording.is_complete else f"the group ended after {done} of {wanted} steps"
        self._finish(recording, generation, rank, note)

    def _begin(self, generation: int, rank: int, data_s: Callable[[], float]) -> None:
        with self._lock:
            wanted, self._requested = self._requested, None
        if wanted is None or wanted[0] != generation:
            return  # of a generation that has ended: the supervisor has ended the request, too
        request = wanted[1]
        if self._writer is not None and self._writer.is_alive():
            self._fail(generation, rank, request, "the profile before this one is still being written; ask again later")
            return
        try:
            from shoal_workers.engine.profiling.recording import Recording  # loads torch's profiler

            self._recording = Recording(request, self._position, data_s, has_gpu=self._has_gpu)
        except Exception as error:
            self._fail(generation, rank, request, f"the profiler did not start: {type(error).__name__}: {error}")

    def _finish(self, recording: Recording, generation: int, rank: int, note: str) -> None:
        self._recording = None
        try:
            recording.stop()
        except Exception as error:
            self._fail(
                generation, rank, recording.request, f"the profiler did not stop: {type(error).__name__}: {error}"
            )
            return
        self._writer = threading.Thread(
            target=self._write, args=(recording, generation, rank, note), name="shoal-profile", daemon=True
        )
        self._writer.start()

    def _write(self, recording: Recording, generation: int, rank: int, note: str) -> None:
        """Runs on the writer thread. The table is kept even if the files cannot be."""
        remove_abandoned()
        directory = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
        times, digest_found, notes = tuple(recording.times), None, [note]
        try:
            recording.save(
                directory,
                trace_name=f"trace-rank{rank}-g{generation}.json.gz",
                memory_name=f"memory-rank{rank}-g{generation}.json.gz",
            )
            digest_found = _digest(directory)
            times = corrected(times, digest_found.unseen_s)
            notes.append(digest_found.note)
            keep(self._root, recording.request.number, directory, digest_found.files)
        except Exception as error:
            _log.warning("profile.files_lost", exc_info=True)
            notes.append(f"no files: {type(error).__name__}: {error}")
            digest_found = digest_found.model_copy(update={"files": ()}) if digest_found is not None else None
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        self._outbox.report(
            Profiled(
                generation=generation,
                number=recording.request.number,
                rank=rank,
                times=times,
                files=digest_found.files if digest_found is not None else (),
                peak_bytes=digest_found.peak_bytes if digest_found is not None else None,
                overlaps=digest_found.overlaps if digest_found is not None else (),
                held_s=recording.held_s,
                note="; ".join(text for text in notes if text)[:500],
            )
        )

    def _fail(self, generation: int, rank: int, request: ProfileRequest, error: str) -> None:
        _log.warning("profile.failed", extra={"number": request.number, "error": error})
        self._outbox.report(Profiled(generation=generation, number=request.number, rank=rank, error=error[:2000]))


def remove_abandoned() -> None:
    """Deletes what workers of this machine have left that were killed while they wrote a profile."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        pid = path.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(path, ignore_errors=True)


def _digest(directory: Path) -> Digest:
    """Raises OSError, subprocess.SubprocessError, ValueError."""
    program = [sys.executable, "-m", "shoal_workers.engine.profiling.digest", str(directory)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=_DIGEST_S, check=False)
    if done.returncode:
        raise ValueError((done.stderr.strip().splitlines() or ["the digest of the trace failed"])[-1])
    return Digest.model_validate_json(done.stdout)


def corrected(times: Sequence[StepTimes], unseen_s: Sequence[float]) -> tuple[StepTimes, ...]:
    """Moves communication that only the trace shows out of the time of computing. A step's length does not change.

    Args:
        unseen_s: for each step, see `digest.unseen_communication`.
    """
    return tuple(_moved(time_s, extra_s) for time_s, extra_s in zip(times, unseen_s, strict=True))


def _moved(times: StepTimes, extra_s: float) -> StepTimes:
    moved_s = min(extra_s, times.seconds[Category.COMPUTE])
    seconds = {
        **times.seconds,
        Category.COMPUTE: times.seconds[Category.COMPUTE] - moved_s,
        Category.COMMUNICATION: times.seconds[Category.COMMUNICATION] + moved_s,
    }
    return times.model_copy(update={"seconds": seconds})


def keep(root: str, number: int, directory: Path, files: Sequence[ProfileFile]) -> None:
    """Copies the files of profile `number` from a local directory, and deletes the profiles that are too old."""
    profiles = open_job_directory(root).child(FOLDER)
    place = profiles.child(name_of(number))
    place.create()
    for file in files:
        place.write(file.name, [(directory / file.name).read_bytes()])
    for old in to_delete(profiles.directories(), number):
        profiles.child(old).remove_tree()
