"""Whether a node can read the checkpoints of a job."""

from pathlib import Path

from shoal_service.supervisor.checkpoints import why_unreadable
from shoal_workers.checkpoint.storage import open_job_directory
from shoal_workers.contract.marker import MARKER_NAME, CheckpointName


def test_a_node_says_why_it_cannot_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    root, name = str(tmp_path / "ckpt" / "job-1"), str(CheckpointName(7, 1, 1))
    assert why_unreadable(root, name) == f"{root}: it has no checkpoint, and the job has committed {name}"
    assert why_unreadable(root, "") == f"{root} is not there"
    place = open_job_directory(root).child(name)
    place.create()
    assert "it has no checkpoint" in why_unreadable(root, name), "it was never committed"
    assert why_unreadable(root, "") == ""
    place.write(MARKER_NAME, [b"{}"])
    assert why_unreadable(root, name) == ""
    assert "no-such-protocol" in why_unreadable("no-such-protocol://bucket/job-1", name)
    assert "is not the name of a checkpoint" in why_unreadable(root, "../../etc")
