"""The files of a job's profiles in its storage: written, and deleted once enough newer profiles are there.

    <checkpoint.url>/<job id>/profiles/profile-000003/trace-rank0-g1.json.gz
                                                      memory-rank0-g1.json.gz

Called by the worker that took the profile, on a thread of its own: storage may hang. Every failure is an OSError.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shoal_workers.checkpoint.storage import open_job_directory
from shoal_workers.contract.profiling.files import FOLDER, name_of, to_delete
from shoal_workers.contract.profiling.messages import ProfileFile


def keep(root: str, number: int, directory: Path, files: Sequence[ProfileFile]) -> None:
    """Copies the files of profile `number` from a local directory, and deletes the profiles that are too old."""
    profiles = open_job_directory(root).child(FOLDER)
    place = profiles.child(name_of(number))
    place.create()
    for file in files:
        place.write(file.name, [(directory / file.name).read_bytes()])
    for old in to_delete(profiles.directories(), number):
        profiles.child(old).remove_tree()
