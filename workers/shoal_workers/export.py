"""`python -m shoal_workers.export CHECKPOINT OUT`: a durable checkpoint of any layout -> a directory of safetensors.

    OUT/config.json                            what transformers' AutoModelForCausalLM.from_pretrained(OUT) reads
    OUT/tokenizer.json ...                     the tokenizer that the text was read with, if the model has one
    OUT/model.safetensors                      or several files, with model.safetensors.index.json

    OUT/adapter_config.json                    of a model with adapters these two alone, with the tokenizer: what peft's
    OUT/adapter_model.safetensors              PeftModel.from_pretrained(model, OUT) reads

One process, no group, no GPU. At most one file's tensors are in memory at a time. The checkpoint contains the names of
the exported tensors and the content of config.json (`export_config` in engine/task/task.py). The optimizer's state is
not exported. If it has averages of the weights (`optimizer.ema_decay`), these are exported in their place, unless
`--raw` asks for the weights. With `--resume` the directory has a manifest too: an export that was broken off goes on,
and a repeated one verifies and repairs. Called by `shoal export`, and with `--resume` by `shoal model get`.

The manifest names the model that the directory holds, and the length and SHA-256 of each file that is whole.

    OUT/shoal-export.json     {"of": {"checkpoint": ..., "dtype": ...}, "files": {NAME: {"bytes": ..., "sha256": ...}},
                               "result": null until all files are there}

Files appear under their names when they are whole: they are written beside, as NAME.part, and moved. So an export that
was broken off goes on with the files that it lacks, a repeated one reads what is there and repairs what differs, and a
server of models can verify what it loads. A directory of another model is never written to.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shoal_workers.checkpoint.commit import newest_committed
from shoal_workers.checkpoint.errors import CheckpointError
from shoal_workers.checkpoint.reader import load, read_catalogue
from shoal_workers.contract.marker import CheckpointName
from shoal_workers.contract.model import TASK_STATE
from shoal_workers.contract.optimizers import EMA

FILE_BYTES = 4 << 30
_PREFIX = "model."
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written."""

    checkpoint: str
    num_tensors: int
    num_bytes: int
    files: tuple[str, ...]


def main() -> int:
    """Exit status 1 if the checkpoint cannot be read or the directory cannot be written; the reason is on standard
    error."""
    parser = argparse.ArgumentParser(
        prog="python -m shoal_workers.export", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("checkpoint", help="URL or directory of a checkpoint, or of a job's checkpoints")
    parser.add_argument("out", type=Path, help="directory to write; it must be empty, or not exist")
    parser.add_argument("--dtype", choices=sorted(_DTYPES), default="fp32", help="of the tensors that are written")
    parser.add_argument("--raw", action="store_true", help="the weights, also if the checkpoint has their averages")
    parser.add_argument("--resume", action="store_true", help="keep a manifest; go on with an export of the same model")
    parser.add_argument("--json", action="store_true", help="one line of JSON about the result on standard output")
    arguments = parser.parse_args()
    try:
        done = export(
            arguments.checkpoint,
            arguments.out,
            dtype=_DTYPES[arguments.dtype],
            raw=arguments.raw,
            resume=arguments.resume,
        )
    except (CheckpointError, OSError, ImportError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    result = {"checkpoint": done.checkpoint, "tensors": done.num_tensors, "bytes": done.num_bytes, "files": done.files}
    message = f"{done.num_tensors} tensors, {done.num_bytes:,} bytes from {done.checkpoint}"
    sys.stdout.write((json.dumps(result) if arguments.json else message) + "\n")
    return 0


def export(
    checkpoint: str,
    out: Path,
    *,
    dtype: torch.dtype = torch.float32,
    file_bytes: int = FILE_BYTES,
    raw: bool = False,
    resume: bool = False,
) -> Exported:
    """Write the model of a checkpoint, or of the newest one under a job's directory.

    Args:
        dtype: of floating-point tensors; others keep their dtype.
        file_bytes: largest size of a file, unless it contains a single larger tensor.
        raw: the weights, also if the checkpoint has their averages.
        resume: keep a manifest. Files that a former export of the same model has left whole are not written again; if
            all are there, the checkpoint is not read.

    Raises:
        DamagedCheckpoint: a file differs from what was written.
        ValueError: it does not describe its model.
        FileExistsError: `out` is not empty; with `resume`, and not an export of this model with these settings.
        ImportError: safetensors is not installed.
    """
    save_file = _writer()
    source = _find(checkpoint)
    settings = {"dtype": str(dtype).removeprefix("torch."), "raw": raw, "file_bytes": file_bytes}
    manifest = Manifest(out, {"checkpoint": source, **settings}) if resume else None
    if manifest is not None and (done := manifest.result) is not None:
        return Exported(**{**done, "files": tuple(done["files"])})
    shapes, extra = read_catalogue(source)
    described = extra.get("export")
    if not isinstance(described, dict):
        raise ValueError(
            f"checkpoint {source} does not describe its model, because it was saved by a version without export. "
            "Resume the job, and export a checkpoint that it saves afterwards."
        )
    adapter = described.get("adapter")
    names = _names(shapes, described.get("renames", ()), described.get("without"))
    if adapter is not None:
        names = _adapter_names(names, adapter)
    scalars = {f"{_PREFIX}{name}" for name in described.get("scalars", ())}
    if not raw:
        names = {_average_of(name, shapes): given for name, given in names.items()}
        scalars = {_average_of(name, shapes) for name in scalars}
    out.mkdir(parents=True, exist_ok=True)
    if manifest is None and any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty. Name an empty directory, or one that does not exist.")

    def write(name: str, content: Callable[[Path], object]) -> None:
        if manifest is None:
            content(out / name)
        elif not manifest.has(name):
            manifest.write(name, content)

    limit = file_bytes if adapter is None else sys.maxsize  # peft reads one file
    groups = list(_groups({name: shapes[name] for name in names}, dtype, limit))
    kind = "model" if adapter is None else "adapter_model"
    config_name = "config.json" if adapter is None else "adapter_config.json"
    config = {**described.get("config", {}), "dtype": settings["dtype"]} if adapter is None else adapter["config"]
    write(config_name, lambda path: path.write_text(json.dumps(config, indent=2) + "\n"))
    for name, path in described.get("files", {}).items():
        if not Path(path).is_file():
            raise FileNotFoundError(f"{path}, the model's {name}, is not on this machine. Export where it can be read.")
        write(Path(name).name, partial(shutil.copyfile, path))
    file_of: dict[str, str] = {}
    num_bytes = 0
    for number, group in enumerate(groups, 1):
        file = f"{kind}.safetensors" if len(groups) == 1 else f"{kind}-{number:05d}-of-{len(groups):05d}.safetensors"

        def save(path: Path, group: Sequence[str] = group) -> None:
            state = {name: torch.empty_like(shapes[name], device="cpu") for name in group}
            load(state, directory=source)
            tensors = {
                names[name]: (tensor.view(()) if name in scalars else tensor).to(_written(tensor, dtype))
                for name, tensor in state.items()
            }
            save_file(tensors, path, metadata={"format": "pt"})
            shutil.copymode(out / config_name, path)  # safetensors creates files that only their owner can read

        write(file, save)
        file_of |= dict.fromkeys((names[name] for name in group), file)
        num_bytes += sum(shapes[name].numel() * _written(shapes[name], dtype).itemsize for name in group)
    if len(groups) > 1:
        index = {"metadata": {"total_size": num_bytes}, "weight_map": file_of}
        write(f"{kind}.safetensors.index.json", lambda path: path.write_text(json.dumps(index, indent=2) + "\n"))
    result = Exported(source, len(file_of), num_bytes, tuple(sorted(set(file_of.values()))))
    if manifest is not None:
        manifest.complete(asdict(result))
    return result


def _find(url: str) -> str:
    """Return the checkpoint itself, or the newest one under a job's directory."""
    is_checkpoint = CheckpointName.parse(url.rstrip("/").rsplit("/", 1)[-1]) is not None
    return url if is_checkpoint else newest_committed(url) or url


def _names(shapes: Mapping[str, torch.Tensor], renames: Any, without: str | None) -> dict[str, str]:
    """Name in the checkpoint -> exported name, for the model's tensors. `without`: a regular expression of names that
    are left out."""
    names = {}
    for name in shapes:
        if name.startswith(_PREFIX):
            given = name.removeprefix(_PREFIX)
            if given.startswith(f"{TASK_STATE}."):
                continue
            if without is not None and re.search(without, given):
                continue
            for pattern, replacement in renames:
                given = re.sub(pattern, replacement, given)
            names[name] = given
    return names


def _adapter_names(names: Mapping[str, str], adapter: Mapping[str, Any]) -> dict[str, str]:
    """Those of the adapters' tensors alone, as peft has them."""
    adapters = {}
    for name, given in names.items():
        if re.search(adapter["only"], given):
            for pattern, replacement in adapter["renames"]:
                given = re.sub(pattern, replacement, given)
            adapters[name] = given
    return adapters


def _average_of(name: str, shapes: Mapping[str, torch.Tensor]) -> str:
    """Return the average of a tensor of the model, if the checkpoint has one, else itself: a frozen parameter, a
    buffer."""
    average = f"optim.{name.removeprefix(_PREFIX)}.{EMA}"
    return average if average in shapes else name


def _groups(shapes: Mapping[str, torch.Tensor], dtype: torch.dtype, file_bytes: int) -> Iterator[list[str]]:
    """Yield the names of the tensors of each file."""
    group: list[str] = []
    filled = 0
    for name, shape in shapes.items():
        num_bytes = shape.numel() * _written(shape, dtype).itemsize
        if group and filled + num_bytes > file_bytes:
            yield group
            group, filled = [], 0
        group.append(name)
        filled += num_bytes
    yield group


def _written(tensor: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
    if tensor.is_complex():
        return torch.complex64  # the only one that the format has
    return dtype if tensor.is_floating_point() else tensor.dtype


def _writer() -> Any:
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise ImportError(f"export needs safetensors ({error}): pip install 'shoal[hf]'.") from error
    return save_file


NAME = "shoal-export.json"


class Manifest:
    """That of a directory, as it is in the storage after each call."""

    def __init__(self, out: Path, of: Mapping[str, Any]) -> None:
        """Read the manifest, if there is one.

        Args:
            of: what the files depend on: the checkpoint and the settings of the export.

        Raises FileExistsError: the directory holds something else.
        """
        self._out = out
        self._of = dict(of)
        self._files: dict[str, dict[str, Any]] = {}
        self._result: dict[str, Any] | None = None
        manifest = _read(out / NAME)
        if manifest is None:
            if out.exists() and any(out.iterdir()):
                raise FileExistsError(f"{out} is not empty. Name an empty directory, or one that does not exist.")
            return
        if manifest["of"] != self._of:
            raise FileExistsError(
                f"{out} holds an export of {manifest['of'].get('checkpoint')} ({_settings(manifest['of'])}), not of "
                f"{self._of.get('checkpoint')} ({_settings(self._of)}). Name another directory, for example one for "
                "each version, or delete this one."
            )
        self._files, self._result = manifest["files"], manifest["result"]

    @property
    def result(self) -> dict[str, Any] | None:
        """What the export has returned, if all of its files are there and whole. None if it is not complete."""
        return self._result if self._result is not None and all(map(self.has, self._files)) else None

    def has(self, name: str) -> bool:
        """Return whether this file is there, and as it was written. Reads all of it."""
        recorded, path = self._files.get(name), self._out / name
        return recorded is not None and path.is_file() and recorded == _facts(path)

    def write(self, name: str, write: Callable[[Path], object]) -> None:
        """Call `write` with the path of a file beside, move it to its name and record it."""
        self._out.mkdir(parents=True, exist_ok=True)
        self._save()  # before the first file: what is broken off now is known to be this export
        part = self._out / f"{name}.part"
        write(part)
        with part.open("rb") as written:
            os.fsync(written.fileno())
        facts = _facts(part)
        part.replace(self._out / name)
        self._files[name] = facts
        self._save()

    def complete(self, result: Mapping[str, Any]) -> None:
        self._result = dict(result)
        self._save()

    def _save(self) -> None:
        part = self._out / f"{NAME}.part"
        document = {"of": self._of, "files": self._files, "result": self._result}
        part.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")
        part.replace(self._out / NAME)


def _read(path: Path) -> dict[str, Any] | None:
    """None if there is no file, or it is not a manifest, so its directory is not an export's."""
    try:
        manifest = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
    is_one = isinstance(manifest, dict) and all(isinstance(manifest.get(key), dict) for key in ("of", "files"))
    return manifest if is_one and isinstance(manifest.get("result"), dict | None) else None


def _settings(of: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in of.items() if name != "checkpoint")


def _facts(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return {"bytes": file.tell(), "sha256": digest.hexdigest()}


if __name__ == "__main__":
    sys.exit(main())
