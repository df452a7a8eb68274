"""The resources of the REST API about what jobs leave: files, media, lineage of checkpoints, the registry of models.

Pure data, as in `views`: no method here reads or decides anything.
"""

from __future__ import annotations

from pydantic import Field

from shoal_service.views import CheckpointState
from shoal_workers.contract import Frozen, MediaRecord

MODEL_NAME = r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$"
ALIAS_NAME = r"^[A-Za-z]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$"
"""An alias begins with a letter, so that it is never mistaken for a version."""


class MediaPage(Frozen):
    """What a job has logged besides numbers."""

    steps: tuple[int, ...]
    """All steps with media, the first one first."""
    items: tuple[MediaRecord, ...]
    """The records of the requested step, else the newest ones; the oldest first."""
    num_records: int
    """Records of all steps."""


class OutputView(Frozen):
    """A file that the program of a job has written."""

    name: str
    """Path below the job's directory. A file of another node than rank 0's whose name is taken is below `node-N/`."""
    bytes: int
    modified_at: float
    """Time of its last change, seconds since the epoch."""
    sha256: str
    node: int
    """Number of the node that has written it; 0 is that of rank 0."""


class OutputPage(Frozen):
    """What the program of a job has written below its directory, as it is in the job's storage."""

    items: tuple[OutputView, ...]
    """By name; at most as many as were requested."""
    num_files: int
    """Files that match."""
    bytes: int
    """Bytes of all of them."""
    num_left_out: int = 0
    """Files of the job that are not kept, since newer ones fill `outputs.max_gib`."""
    bytes_left_out: int = 0


class LineageParent(Frozen):
    """What a job has begun with."""

    job_id: str = ""
    """The job whose checkpoint it goes on from; empty: it began with weights of `url`."""
    checkpoint: str = ""
    step: int | None = None
    url: str = ""


class LineageJob(Frozen):
    """A job, and what its weights come from."""

    job_id: str
    name: str = ""
    project: str = ""
    spec_version: int = 0
    spec_sha256: str = ""
    """SHA-256 of the canonical JSON of its newest spec."""
    code: str = ""
    """What it runs: its task, or the program of its script or loop."""
    code_sha256: str = ""
    """SHA-256 of the uploaded archive; empty: the code is installed on the nodes."""
    data_source: str = ""
    """Where its spec says that the training data are: a corpus, paths, or the parts of a mixture."""
    data: str = ""
    """Content hash of the training data as the newest group has reported it; empty: it is not known."""
    parent: LineageParent | None = None
    """None if it began with weights that its seed has drawn."""
    is_known: bool = True
    """False: the job was deleted, or belongs to a project that is not visible here; the chain ends."""


class LineageView(Frozen):
    """Where the checkpoints of a job come from."""

    jobs: tuple[LineageJob, ...]
    """The job itself, then the one that it goes on from, and so on."""
    is_whole: bool = True
    """False: the chain is longer than what is shown."""
    registered: tuple[ModelVersion, ...] = ()
    """Versions of models that are checkpoints of this job."""


class ModelVersion(Frozen):
    """A checkpoint under a name and a number. It is never deleted while it is registered."""

    project: str
    name: str
    version: int
    job_id: str
    checkpoint: str
    """Name of the checkpoint's directory."""
    step: int
    url: str
    """Where it is; serving reads it from there."""
    bytes: int = 0
    """Size of the checkpoint; 0: it is not known."""
    metrics: dict[str, float] = Field(default_factory=dict)
    """Losses and the task's own metrics of the step, as they were at the registration."""
    state: CheckpointState | None = None
    """State of the checkpoint now; null: its job was deleted, so nothing has looked at it since."""
    registered_at: float
    registered_by: str
    description: str = ""
    aliases: tuple[str, ...] = ()
    lineage: tuple[LineageJob, ...] = ()
    """As it was at the registration: it outlives the jobs."""


class ModelRequest(Frozen):
    """The request to register a checkpoint as the next version of a model."""

    job: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")
    """Id of the job."""
    step: int | None = Field(None, ge=0, le=2**53)
    """The step of its committed checkpoint; null: the newest one."""
    description: str = Field("", max_length=4096)


class AliasRequest(Frozen):
    """The request to let an alias name this version from now on."""

    version: int = Field(ge=1, le=2**31 - 1)


LineageView.model_rebuild()
