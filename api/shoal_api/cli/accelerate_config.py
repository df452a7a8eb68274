"""accelerate's configuration file as what Shoal makes of it: workers, and variables of the script.

    num_processes                                   workers
    mixed_precision, use_cpu, dynamo_config ...     variables, as `accelerate launch` sets them
    fsdp_config                                     variables FSDP_..., if distributed_type is FSDP
    machine_rank, main_process_ip, gpu_ids ...      left out: Shoal brings the processes together itself
    deepspeed_config, fp8_config, SageMaker ...     refused by name

Hides the keys and which variable each becomes. Opens no other file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from shoal_api.cli.errors import CliError
from shoal_api.cli.exit_codes import ExitCode

_TYPES = ("NO", "MULTI_GPU", "MULTI_CPU", "FSDP")
"""Values of `distributed_type` that Shoal can start."""
_LEFT_OUT = frozenset(
    {
        *("machine_rank", "num_machines", "gpu_ids", "main_process_ip", "main_process_port", "rdzv_backend"),
        *("same_network", "main_training_function"),
    }
)
_READ = frozenset(
    {
        *("compute_environment", "distributed_type", "num_processes", "num_cpu_threads_per_process"),
        *("mixed_precision", "use_cpu", "debug", "enable_cpu_affinity", "dynamo_config", "fsdp_config"),
        "gradient_accumulation_steps",
    }
)
_OTHER_NAMES = {"FSDP_TRANSFORMER_LAYER_CLS_TO_WRAP": "FSDP_TRANSFORMER_CLS_TO_WRAP"}
"""Variables that are not called as their key."""
_EMPTY: tuple[object, ...] = (None, False, "", "no", {}, [])
"""Values of keys that `accelerate config` writes although they say nothing."""


@dataclass(frozen=True, slots=True)
class AccelerateConfig:
    """What a file says."""

    path: Path
    num_processes: int | None
    env: Mapping[str, str]
    left_out: tuple[str, ...]
    """Keys that mean nothing to a job."""


def default_config(environ: Mapping[str, str]) -> Path | None:
    """Return the file that `accelerate config` writes, and `accelerate launch` reads by default; None if there is
    none."""
    cache = environ.get("XDG_CACHE_HOME", "~/.cache")
    folder = Path(environ.get("HF_HOME", f"{cache}/huggingface")).expanduser() / "accelerate"
    path = folder / "default_config.yaml"
    return path if path.is_file() else None


def read_config(path: Path) -> AccelerateConfig:
    """Read a file. Raises CliError if it is not there or asks for what Shoal does not start."""
    try:
        document = yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        hint = "name a file that accelerate config has written"
        raise CliError(f"accelerate's {path}: {error.strerror}", exit_code=ExitCode.NOT_FOUND, hint=hint) from None
    except (yaml.YAMLError, UnicodeDecodeError):
        document = None
    if not isinstance(document, dict):
        raise CliError(f"accelerate's {path} is not a YAML file with keys", hint="write it with accelerate config")
    _refuse(path, document)
    left_out = tuple(sorted(key for key in document.keys() & _LEFT_OUT if document[key] not in (None, "", False)))
    number = document.get("num_processes")
    return AccelerateConfig(path, number if isinstance(number, int) and number > 0 else None, _env(document), left_out)


def _refuse(path: Path, document: Mapping[str, Any]) -> None:
    where, kind = document.get("compute_environment", "LOCAL_MACHINE"), document.get("distributed_type", "NO")
    if where != "LOCAL_MACHINE":
        raise CliError(
            f"accelerate's {path}: compute_environment {where} is not one that Shoal starts",
            hint="give --config_file one for LOCAL_MACHINE",
        )
    if kind is not False and kind not in _TYPES:
        raise CliError(
            f"accelerate's {path}: distributed_type {kind} is not one that Shoal starts, which are {', '.join(_TYPES)}",
            hint="pass the plugin to Accelerator in the script, for example DeepSpeedPlugin, and set MULTI_GPU here",
        )
    unknown = [key for key, value in document.items() if key not in _READ | _LEFT_OUT and value not in _EMPTY]
    if unknown:
        raise CliError(
            f"accelerate's {path}: Shoal cannot read {', '.join(map(str, unknown))}",
            hint="remove the key, and set what it stands for in the script or with --set code.env.NAME=VALUE",
        )


def _env(document: Mapping[str, Any]) -> dict[str, str]:
    variables: dict[str, str] = {}
    precision = document.get("mixed_precision")
    if precision is not None:
        variables["ACCELERATE_MIXED_PRECISION"] = "no" if precision is False else str(precision)
    for key, variable in (
        ("use_cpu", "ACCELERATE_USE_CPU"),
        ("debug", "ACCELERATE_DEBUG_MODE"),
        ("enable_cpu_affinity", "ACCELERATE_CPU_AFFINITY"),
        ("gradient_accumulation_steps", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"),
        ("num_cpu_threads_per_process", "OMP_NUM_THREADS"),
    ):
        value = document.get(key)
        if value not in _EMPTY:
            flag = "1" if variable == "ACCELERATE_CPU_AFFINITY" else "true"
            variables[variable] = flag if value is True else str(value)
    for key, value in _prefixed(document.get("dynamo_config"), "dynamo_"):
        variables[f"ACCELERATE_{key}"] = str(value).upper() if key == "DYNAMO_BACKEND" else str(value)
    if document.get("distributed_type") == "FSDP":
        variables["ACCELERATE_USE_FSDP"] = "true"
        for key, value in _prefixed(document.get("fsdp_config"), "fsdp_"):
            variables[_OTHER_NAMES.get(key, key)] = str(value).lower() if isinstance(value, bool) else str(value)
    return variables


def _prefixed(section: Any, prefix: str) -> list[tuple[str, Any]]:
    """Return the keys of a section as the ends of variables; accelerate lets their prefix be left out."""
    items = section.items() if isinstance(section, dict) else ()
    named = ((str(key) if str(key).startswith(prefix) else f"{prefix}{key}", value) for key, value in items)
    return [(key.upper(), value) for key, value in named if value is not None]
