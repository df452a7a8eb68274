"""The proof of a generation's layout, before its model is built. Called by `TaskProgram` on all ranks.

    rank 0 knows it already      the others learn it, and nothing is computed
    otherwise                    `prove`, and rank 0 remembers what it has found: one small file on this node

A file's name covers what a proof depends on: the files of the task's code, the spec's sections, the axes of the layout,
and the versions of Shoal and torch. A file that cannot be read or written costs a proof, and nothing else.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
from contextlib import suppress
from pathlib import Path

import torch

from shoal_workers.contract.exception_causes import FrameOwner
from shoal_workers.contract.layout import Layout
from shoal_workers.contract.messages import ProofDemand
from shoal_workers.contract.proofs import LayoutProof, ProofOutcome
from shoal_workers.contract.spec import JobSpec
from shoal_workers.engine.generation_ends import LayoutRefused
from shoal_workers.engine.group.process_group import Group
from shoal_workers.engine.proof.attributes import has_no_state
from shoal_workers.engine.proof.prove import prove
from shoal_workers.engine.state.restore import is_restoring
from shoal_workers.engine.step.first_look import describe_changed
from shoal_workers.engine.step.generation import Generation
from shoal_workers.engine.task.code_owner import owner_of
from shoal_workers.version import VERSION


def proof_of(generation: Generation, group: Group) -> LayoutProof | None:
    """Returns None if nothing was demanded. The data axes are proven for a job that begins, without a demand.

    Raises:
        LayoutRefused: the layout trains another model; or it could not be proven, and must be.
        TaskFailed: the task's own code raised; or on the data axes it trains another model.
    """
    demand = generation.assignment.proof
    if demand is ProofDemand.NONE:
        if not _is_proven_without_demand(generation):
            return None
        _accept_on_data_axes(generation, _found_or_made(generation, group))
        return None
    proof = _found_or_made(generation, group)
    if proof.outcome is ProofOutcome.REFUSED:
        raise LayoutRefused(proof)
    if proof.outcome is ProofOutcome.UNPROVEN:
        message = f"the layout {generation.layout.describe()} was not proven: {proof.words}"
        if demand is ProofDemand.REQUIRED:
            raise LayoutRefused(proof.model_copy(update={"words": message}))
        generation.say(f"{message}. It is used because the spec fixes it.")
    return proof


def _is_proven_without_demand(generation: Generation) -> bool:
    is_of_engine = has_no_state(generation.task.instance)
    return not (generation.layout.planned_axes or is_of_engine or is_restoring(generation.assignment))


def _found_or_made(generation: Generation, group: Group) -> LayoutProof:
    generation.position.note(f"proving the layout {generation.layout.describe()}")
    known = find_proof(generation.spec, generation.layout) if generation.rank == 0 else None
    text = group.decide("proof", known.model_dump_json() if known else "", lambda texts: texts[0])
    if text:
        return LayoutProof.model_validate_json(text)
    try:
        proof = prove(generation, lambda own: group.decide("whole side", own, lambda texts: texts[0]))
    except LayoutRefused as refused:
        proof = refused.proof
    gc.collect()  # the copies refer to the group, which must not outlive its generation
    if generation.rank == 0:
        keep_proof(generation.spec, proof)
    return proof


def _accept_on_data_axes(generation: Generation, proof: LayoutProof) -> None:
    if proof.outcome is ProofOutcome.REFUSED:
        with generation.user_code:
            raise ValueError(proof.words)
    # That samples differ when they are read again is said by the training.
    if proof.words and proof.words != describe_changed(generation.task.line_of("build_dataset")):
        generation.remarks.add(proof.words)


DIRECTORY = "SHOAL_PROOFS"
"""Names another directory than ~/.cache/shoal/proofs; empty: nothing is remembered."""
_SECTIONS = {
    *("task", "loop", "model", "data", "plan", "batch", "seed", "optimizer"),
    *("precision", "module_precision", "reduce_precision", "fp8", "deterministic"),
}


def find_proof(spec: JobSpec, layout: Layout) -> LayoutProof | None:
    """Returns None if it was not proven or refused yet."""
    with suppress(OSError, ValueError):
        file = _file(spec, layout)
        if file is not None:
            proof = LayoutProof.model_validate_json(file.read_text())
            return proof.model_copy(update={"is_cached": True, "layout": layout})
    return None


def keep_proof(spec: JobSpec, proof: LayoutProof) -> None:
    """Keeps only what is certain, and what is not known of the data axes."""
    if proof.outcome is ProofOutcome.UNPROVEN and proof.layout.planned_axes:
        return
    with suppress(OSError):
        file = _file(spec, proof.layout)
        if file is not None:
            _write(file, proof.model_dump_json())


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(f".{os.getpid()}")
    part.write_text(text)
    # In one step: another worker of this node may be reading the file.
    part.rename(file)


def _file(spec: JobSpec, layout: Layout) -> Path | None:
    directory = os.environ.get(DIRECTORY)
    if directory == "":
        return None
    root = Path(directory) if directory else Path.home() / ".cache" / "shoal" / "proofs"
    return root / f"{key_of(spec, layout)}.json"


def key_of(spec: JobSpec, layout: Layout) -> str:
    """Called after the task was loaded: the modules that it has imported count as its code."""
    digest = hashlib.sha256()
    described = spec.model_dump(mode="json", include=_SECTIONS)
    versions = [VERSION, torch.__version__, *_own_version()]
    features = [*sorted(layout.features), layout.num_data_ranks > 1]
    digest.update(json.dumps([described, features, versions], sort_keys=True).encode())
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    for name in sorted(name for name in files if isinstance(name, str) and owner_of(name) is FrameOwner.TASK):
        with suppress(OSError):
            digest.update(hashlib.sha256(Path(name).read_bytes()).digest())
    return digest.hexdigest()[:32]


def _own_version() -> list[str]:
    """The age and number of this package's files, for those who change Shoal itself."""
    package = Path(__file__).parents[2]
    stamps = [file.stat() for folder in ("engine", "tasks") for file in (package / folder).rglob("*.py")]
    return [str(max((stamp.st_mtime_ns for stamp in stamps), default=0)), str(len(stamps))]
