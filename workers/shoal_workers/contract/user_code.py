"""Sections of the spec about the user's code: its source, its environment, its secrets, and programs instead of tasks.

These classes check the names, paths and requirements of a spec. A spec has no secret, only the place of it on the node,
where `engine/process/secrets.py` reads it. `engine/process/packages.py` installs the packages; `engine/loop` and
`script` run the programs. Pure.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, Field, WithJsonSchema
from pydantic.config import JsonDict

from shoal_workers.contract.base import if_set, whole
from shoal_workers.contract.rules import Rule, Section, require_one

_MAX_VARIABLES = 128
_MAX_ENV_CHARS = 32_768
_RESERVED_PREFIXES = ("SHOAL_", "RAY_")
FOR_SCRIPTS = ("SHOAL_RAY_DATA_POSITION", "SHOAL_TENSORBOARD", "SHOAL_WARM_IMPORTS")
"""Variables with these prefixes that a job may set, for its script."""
_REQUIREMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(\[[A-Za-z0-9._, -]+\])?[ A-Za-z0-9.,<>=!~*+()-]*(;[^/\\]*)?")
_INSIDE = r"(?!.*(?:^|/)\.\.(?:/|$))[^/\x00][^\x00]*"
"""Relative paths without `..`."""
_MODULE = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*", re.ASCII)


def _check_variable(name: str) -> str:
    if not (name.isascii() and name.replace("_", "a").isalnum() and not name[0].isdigit()) or len(name) > 255:
        raise ValueError(f"{name[:80]!r} is not the name of a variable: use letters, digits and underscores.")
    if name.startswith(_RESERVED_PREFIXES) and name not in FOR_SCRIPTS:
        raise ValueError(f"{name}: the service sets variables that begin with SHOAL_ or RAY_. Choose another name.")
    return name


def _check_requirement(text: str) -> str:
    if not _REQUIREMENT.fullmatch(text.strip()):
        raise ValueError(
            f'code.pip {text[:80]!r}: use a name, with versions or not, for example "einops==0.8.1". Options, URLs '
            "and paths are not accepted: name an index in pip's own configuration on the nodes, files in code.wheels."
        )
    return text.strip()


Requirement = Annotated[
    str,
    Field(min_length=1, max_length=500, json_schema_extra={"pattern": whole(rf"\s*{_REQUIREMENT.pattern}\s*")}),
    AfterValidator(_check_requirement),
]
_VARIABLE = whole(rf"(?:(?!{'|'.join(_RESERVED_PREFIXES)})[A-Za-z_][A-Za-z0-9_]{{0,254}}|{'|'.join(FOR_SCRIPTS)})")
_VARIABLE_NAMES: JsonDict = {"propertyNames": {"pattern": _VARIABLE}}
"""JSON Schema of an object whose keys are names of environment variables."""
VariableName = Annotated[str, AfterValidator(_check_variable), WithJsonSchema({"type": "string", "pattern": _VARIABLE})]


class CodeSpec(Section):
    """Where the user's own modules come from, and the variables of the processes that run them."""

    working_dir: str | None = Field(None, max_length=4096)
    """A directory on the submitting machine. It is packed at submission; later edits do not change a running job."""
    archive: str | None = Field(None, pattern=r"^[0-9a-f]{64}$")
    """The sha256 of an uploaded archive (`PUT /v1/code/{sha256}`). The client sets it."""
    env: dict[VariableName, str] = Field(
        default_factory=dict, max_length=_MAX_VARIABLES, json_schema_extra=_VARIABLE_NAMES
    )
    """Environment variables of the workers, at most 32,768 characters in all. They are stored and shown with the spec:
    what must stay secret belongs into `secrets`."""

    pip: tuple[Requirement, ...] = Field((), max_length=100)
    """Packages of the workers, as pip's requirements: ["einops==0.8.1"]. Installed once per node, into a directory that
    only processes of jobs with the same list see. Only if the server allows it (SHOAL_ALLOW_PIP)."""
    wheels: str | None = Field(None, max_length=4096, json_schema_extra={"pattern": "^/"})
    """A directory of wheels that every node can read: `pip` takes packages from there alone, and needs no network."""

    rules = (
        Rule(
            lambda code: code.wheels is not None and not code.wheels.startswith("/"),
            lambda code: f"code.wheels {code.wheels!r} must be an absolute directory that every node can read.",
        ),
        Rule(
            lambda code: code.wheels is not None and not code.pip,
            "code.wheels is set, and code.pip names no package. Name those that the task needs.",
            if_set("wheels", {"required": ["pip"], "properties": {"pip": {"minItems": 1}}}),
        ),
        Rule(
            lambda code: code.num_env_chars > _MAX_ENV_CHARS,
            lambda code: (
                f"code.env has {code.num_env_chars} characters; {_MAX_ENV_CHARS} are allowed. Put large "
                "values into a file of code.working_dir."
            ),
        ),
    )

    @property
    def num_env_chars(self) -> int:
        """Characters of all variables, as NAME=value with an end."""
        return sum(len(name) + len(value) + 2 for name, value in self.env.items())


class SecretSource(Section):
    """Where the value of a secret is on the nodes: exactly one of the keys."""

    file: str | None = Field(None, max_length=4096, json_schema_extra={"pattern": "^/"})
    """Absolute path of a file on the worker's node, of 64 KiB at most. A line end at its end is left out."""
    env: VariableName | None = None
    """A variable in the environment of the Ray node."""

    rules = (
        require_one(
            ("file", "env"),
            'a secret has exactly one of file and env, for example {file: "/run/secrets/hub"}.',
        ),
        Rule(
            lambda secret: secret.file is not None and not secret.file.startswith("/"),
            lambda secret: f"the file of a secret, {secret.file!r}, must be an absolute path on the worker's node.",
        ),
    )


Secrets = Annotated[dict[VariableName, SecretSource], Field(max_length=64, json_schema_extra=_VARIABLE_NAMES)]
"""Sources of secrets, by the variables that get the values in the workers."""


class Launcher(StrEnum):
    """Whose environment the script's processes get."""

    TORCHRUN = "torchrun"
    ACCELERATE = "accelerate"
    DEEPSPEED_ENV = "deepspeed_env"
    PYTHON = "python"
    RAY_TRAIN = "ray_train"


class ProgressSource(StrEnum):
    """Where the steps, the curves and the remaining time of a script come from."""

    AUTO = "auto"
    HOOK = "hook"
    TENSORBOARD = "tensorboard"
    NONE = "none"


class ProgramFile(Section):
    """What is run as `__main__`, with its arguments."""

    file: str | None = Field(None, min_length=1, max_length=4096, json_schema_extra={"pattern": whole(_INSIDE)})
    """Path of the script below `code.working_dir`."""
    module: str | None = Field(None, max_length=255, json_schema_extra={"pattern": whole(_MODULE.pattern)})
    """Name of a module that is run as with `python -m`."""
    args: tuple[Annotated[str, Field(max_length=8192)], ...] = Field((), max_length=1000)
    """Arguments of the program."""

    rules = (
        require_one(("file", "module"), "a program has exactly one of file and module, for example {file: train.py}."),
        Rule(
            lambda program: program.file is not None and not re.fullmatch(_INSIDE, program.file),
            lambda program: (
                f"file {program.file!r} must be a path below code.working_dir, without .. and not "
                "absolute, for example train.py."
            ),
        ),
        Rule(
            lambda program: program.module is not None and not _MODULE.fullmatch(program.module),
            lambda program: f"module {program.module!r} is not the name of a module, for example package.train.",
        ),
    )

    @property
    def words(self) -> str:
        """Return the program as a user types it, without arguments: `train.py`, or `-m package.train`."""
        return self.file if self.file is not None else f"-m {self.module}"


class LoopSpec(ProgramFile):
    """A program that keeps its own loop and gives it to Shoal with `shoal.run(train)`: the function is called again, in
    the same process, when the group changes, and what it tracks comes from memory; see docs/loops.md."""


class ScriptSpec(ProgramFile):
    """A program that trains by itself. Shoal starts one process of it per worker, as torchrun does. When one is lost,
    it starts the group again with as many workers as there are. The program goes on from its own checkpoint; see
    docs/porting.md."""

    launcher: Launcher = Launcher.TORCHRUN
    """Whose environment the processes get. torchrun: RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and the
    other variables that torchrun documents; accelerate: also those of `accelerate launch`; deepspeed_env: also
    LOCAL_SIZE, CROSS_RANK and CROSS_SIZE, which DeepSpeed's launcher sets; python: none of them, for a script that is
    not distributed, with one worker. ray_train: those of torchrun, for a script with a `TorchTrainer` of Ray Train:
    rank 0 runs it, and `trainer.fit()` trains on every worker."""
    grace_s: float = Field(10.0, ge=0, le=3600, allow_inf_nan=False)
    """Seconds that a process has between SIGTERM and SIGKILL when its group ends: at a death, a resize, a pause. A
    script that saves on SIGTERM needs as long as a save takes; one without a handler ends at once."""
    progress: ProgressSource = ProgressSource.AUTO
    """Where steps, curves and the remaining time come from. auto: what `shoal.log` says, and as long as it says
    nothing, the TensorBoard event files that rank 0 writes below the working directory, the checkpoint directory, or
    the one that SHOAL_TENSORBOARD names; hook: `shoal.log` only; tensorboard: event files only; none: neither."""
