"""CodeSpec and SecretSource: a user's code, the variables that it finds, and where its secrets are. Pure data.

A secret's value is in no spec: it is read on the worker's node when the worker starts (`engine/process/secrets.py`).
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from shoal_workers.contract.base import Frozen

MAX_VARIABLES = 128
MAX_ENV_CHARS = 32_768
_OF_THE_SERVICE = ("SHOAL_", "RAY_")


def _is_variable(name: str) -> str:
    if not (name.isascii() and name.replace("_", "a").isalnum() and not name[0].isdigit()) or len(name) > 255:
        raise ValueError(f"{name[:80]!r} is not the name of a variable: use letters, digits and underscores.")
    if name.startswith(_OF_THE_SERVICE):
        raise ValueError(f"{name}: the service sets variables that begin with SHOAL_ or RAY_. Choose another name.")
    return name


VariableName = Annotated[str, AfterValidator(_is_variable)]


class CodeSpec(Frozen):
    """Where the user's own modules come from, and the variables of the processes that run them."""

    working_dir: str | None = Field(None, max_length=4096)
    """A directory on the submitting machine. It is packed at submission; later edits do not change a running job."""
    archive: str | None = Field(None, pattern=r"^[0-9a-f]{64}$")
    """The sha256 of an uploaded archive (`PUT /v1/code/{sha256}`). The client sets it."""
    env: dict[VariableName, str] = Field(default_factory=dict, max_length=MAX_VARIABLES)
    """Environment variables of the workers, at most 32,768 characters in all. They are stored and shown with the spec:
    what nobody may see belongs into `secrets`."""

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

    file: str | None = Field(None, max_length=4096)
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
