"""Whether the checkpoints of a job can be read from this cluster. Called by `answering.py` on a thread, since it may
hang."""

from __future__ import annotations

from shoal_service.clusters.calls import MAX_WORDS
from shoal_service.supervisor.checkpoints.catalog import CheckpointCatalog
from shoal_workers.checkpoint.storage import open_job_directory
from shoal_workers.contract.marker import CheckpointName


def why_unreachable(root: str, name: str) -> str:
    """For people; empty: the checkpoint of this name, or a newer one, is there. With an empty name: the directory is.

    Args:
        root: URL of the job's directory.
    """
    try:
        return _why_not(root, name)
    except (OSError, ValueError, ImportError) as error:
        return f"{root} cannot be read: {type(error).__name__}: {error}"[:MAX_WORDS]


def _why_not(root: str, name: str) -> str:
    if not name:
        try:
            open_job_directory(root).files()
        except FileNotFoundError:
            return f"{root} is not there"
        return ""
    wanted = CheckpointName.parse(name)
    if wanted is None:
        return f"{name!r} is not the name of a checkpoint"
    catalog = CheckpointCatalog(root)
    if catalog.has_marker(wanted):
        return ""
    newest = catalog.newest()
    if newest is not None and newest > wanted:
        return ""  # retention has deleted it since
    there = f"the newest checkpoint there is {newest}" if newest is not None else "no checkpoint is there"
    return f"{root} does not have the checkpoint {name}: {there}"
