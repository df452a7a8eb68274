"""CodeSpec and SecretSource: a user's code, the variables that it finds, and where its secrets are. Pure data.

A secret's value is in no spec: it is read on the worker's node when the worker starts (`engine/process/secrets.py`).
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic.config import JsonDict

from shoal_workers.contract.base import Frozen, exactly_one_of, if_set, whole

MAX_VARIABLES = 128
MAX_ENV_CHARS = 32_768
_OF_THE_SERVICE = ("SHOAL_", "RAY_")


def _is_variable(name: str) -> str:
    if not (name.isascii() and name.replace("_", "a").isalnum() and not name[0].isdigit()) or len(name) > 255:
        raise ValueError(f"{name[:80]!r} is not the name of a variable: use letters, digits and underscores.")
    if name.startswith(_OF_THE_SERVICE):
        raise ValueError(f"{name}: the service sets variables that begin with SHOAL_ or RAY_. Choose another name.")
    return name


def _is_requirement(text: str) -> str:
    if not _REQUIREMENT.fullmatch(text.strip()):
        raise ValueError(
            f'code.pip {text[:80]!r}: use a name, with versions or not, for example "einops==0.8.1". Options, URLs '
            "and paths are not accepted: name an index in pip's own configuration on the nodes, files in code.wheels."
        )
    return text.strip()


_REQUIREMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(\[[A-Za-z0-9._, -]+\])?[ A-Za-z0-9.,<>=!~*+()-]*(;[^/\\]*)?")
Requirement = Annotated[
    str,
    Field(min_length=1, max_length=500, json_schema_extra={"pattern": whole(rf"\s*{_REQUIREMENT.pattern}\s*")}),
    AfterValidator(_is_requirement),
]
_VARIABLE = whole(rf"(?!{'|'.join(_OF_THE_SERVICE)})[A-Za-z_][A-Za-z0-9_]{{0,254}}")
VARIABLE_NAMES: JsonDict = {"propertyNames": {"pattern": _VARIABLE}}
"""For a JSON Schema: of an object whose keys are variables."""
VariableName = Annotated[str, AfterValidator(_is_variable), WithJsonSchema({"type": "string", "pattern": _VARIABLE})]


class CodeSpec(Frozen):
    """Where the user's own modules come from, and the variables of the processes that run them."""

    model_config = ConfigDict(
        json_schema_extra=if_set("wheels", {"required": ["pip"], "properties": {"pip": {"minItems": 1}}})
    )

    working_dir: str | None = Field(None, max_length=4096)
    """A directory on the submitting machine. It is packed at submission; later edits do not change a running job."""
    archive: str | None = Field(None, pattern=r"^[0-9a-f]{64}$")
    """The sha256 of an uploaded archive (`PUT /v1/code/{sha256}`). The client sets it."""
    env: dict[VariableName, str] = Field(
        default_factory=dict, max_length=MAX_VARIABLES, json_schema_extra=VARIABLE_NAMES
    )
    """Environment variables of the workers, at most 32,768 characters in all. They are stored and shown with the spec:
    what must stay secret belongs into `secrets`."""

    pip: tuple[Requirement, ...] = Field((), max_length=100)
    """Packages of the workers, as pip's requirements: ["einops==0.8.1"]. Installed once per node, into a directory that
    only processes of jobs with the same list see. Only if the server allows it (SHOAL_ALLOW_PIP)."""
    wheels: str | None = Field(None, max_length=4096, json_schema_extra={"pattern": "^/"})
    """A directory of wheels that every node can read: `pip` takes packages from there alone, and needs no network."""

    @model_validator(mode="after")
    def _has_packages_for_wheels(self) -> CodeSpec:
        if self.wheels is not None and not self.wheels.startswith("/"):
            raise ValueError(f"code.wheels {self.wheels!r} must be an absolute directory that every node can read.")
        if self.wheels is not None and not self.pip:
            raise ValueError("code.wheels is set, and code.pip names no package. Name those that the task needs.")
        return self

    @model_validator(mode="after")
    def _is_small(self) -> CodeSpec:
        size = sum(len(name) + len(value) + 2 for name, value in self.env.items())
        if size > MAX_ENV_CHARS:
            raise ValueError(
                f"code.env has {size} characters; {MAX_ENV_CHARS} are allowed. Put large values into a file of "
                "code.working_dir."
            )
        return self


class SecretSource(Frozen):
    """Where the value of a secret is on the nodes: exactly one of the keys."""

    model_config = ConfigDict(json_schema_extra=exactly_one_of("file", "env"))

    file: str | None = Field(None, max_length=4096, json_schema_extra={"pattern": "^/"})
    """Absolute path of a file on the worker's node, of 64 KiB at most. A line end at its end is left out."""
    env: VariableName | None = None
    """A variable in the environment of the Ray node."""

    @model_validator(mode="after")
    def _is_one(self) -> SecretSource:
        if (self.file is None) == (self.env is None):
            raise ValueError('a secret has exactly one of file and env, for example {file: "/run/secrets/hub"}.')
        if self.file is not None and not self.file.startswith("/"):
            raise ValueError(f"the file of a secret, {self.file!r}, must be an absolute path on the worker's node.")
        return self


Secrets = dict[VariableName, SecretSource]
