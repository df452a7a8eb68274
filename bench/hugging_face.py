"""The table of docs/measured/hugging-face.md: `make bench-hugging-face` or `bench/hugging_face.py [FAMILY ...]`.

Small random models of every family that has a plan, and of those that are no causal language models, offline. For each,
the difference of the task's loss from the one that transformers computes itself, that of the logits after an export,
and for each axis the largest relative difference between one micro-batch whole, in one process, and split over two: of
the loss, and of the gradient of each parameter. The sentence of an axis that a family does not have stands below its
row. The exit status is 0 if no difference is larger than TOLERANCE.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests"))

import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from kit.worlds.encoder_worlds import MODELS, small_spec, their_inputs, write_data
from kit.worlds.hugging_face_configs import small_config
from shoal_workers.contract.checks.legality import violations
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.families import FAMILIES
from shoal_workers.contract.hugging_face import HF_TASK
from shoal_workers.contract.layout import Layout
from shoal_workers.contract.proofs import ProofOutcome
from shoal_workers.contract.spec import JobSpec, plan_of
from shoal_workers.engine.sample_order import training_order
from shoal_workers.engine.task.task import load_task
from shoal_workers.proofs import prove_layouts
from shoal_workers.tasks.hf import HuggingFaceLM

TOLERANCE = 1e-5
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "gemma2, own head": ("gemma2", {"tie_word_embeddings": False}),
    "mixtral, router loss": ("mixtral", {"output_router_logits": True, "router_aux_loss_coef": 0.5}),
    "qwen3_moe, router loss": ("qwen3_moe", {"output_router_logits": True, "router_aux_loss_coef": 0.5}),
}
"""Further rows: a family with other settings."""
PRODUCTS = {
    "mixtral": (Layout(dp_shard=2, ep=2, tp=2), Layout(dp_shard=2, ep=2, pp=2)),
    "deepseek_v3": (Layout(dp_shard=2, ep=2, tp=2), Layout(tp=2, pp=2)),
    "gemma3_text": (Layout(tp=2, pp=2),),
}
"""Layouts of four ranks that are proven too."""
LAYOUTS = {
    "dp": Layout(dp_shard=2),
    "tp": Layout(tp=2),
    "pp": Layout(pp=2),
    "ep": Layout(dp_shard=2, ep=2),
    "cp": Layout(cp=2),
}


@dataclass
class Row:
    """What was found of one family."""

    family: str
    loss: float = 0.0
    """Difference of the task's loss from that of transformers."""
    export: float = 0.0
    """Difference of the logits of the model that transformers loads from an export."""
    differences: dict[str, float] = field(default_factory=dict)
    """By axis, where it is proven."""
    refused: dict[str, str] = field(default_factory=dict)
    """By axis, the sentence of an axis that it does not have."""
    wrong: dict[str, str] = field(default_factory=dict)
    """By axis, what differs."""


def spec_of(family: str, cache_dir: str, **model: Any) -> JobSpec:
    """A job that trains it on little text."""
    return parse_spec(
        {
            "task": HF_TASK,
            "model": {"config": {**small_config(family), **model}, "seq_len": 16},
            "data": {"corpus": "python-stdlib", "max_bytes": 200_000, "cache_dir": cache_dir},
            "batch": {"global_size": 8, "micro_size": 2},
            "stop": {"steps": 1},
            "seed": 3,
        }
    )


def loss_difference(spec: JobSpec) -> float:
    """The task's loss of a micro-batch, beside the loss that a model of transformers with the same weights computes."""
    task = HuggingFaceLM(spec.model, spec.data, spec.seed)
    torch.manual_seed(1)
    model = task.build_model()
    torch.manual_seed(1)
    config = AutoConfig.for_model(**spec.model["config"])
    network: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tokens = torch.randint(257, (2, 17), generator=torch.Generator().manual_seed(2))
    batch = task.collate(list(tokens))
    labels = batch["labels"].contiguous()
    with torch.no_grad():
        returned = task.loss(model, batch)
        theirs = network(input_ids=batch["tokens"], labels=labels, shift_labels=labels).loss
    own = returned[0] if isinstance(returned, tuple) else returned
    return float((own - theirs).abs())


def export_difference(spec: JobSpec, out: Path) -> float:
    """The logits of a model, beside those of what transformers loads from the files that `shoal export` writes."""
    task = HuggingFaceLM(spec.model, spec.data, spec.seed)
    torch.manual_seed(1)
    model: Any = task.build_model().eval()
    loaded, report = written(model, task.export_config(model), out, AutoModelForCausalLM)
    if report["missing_keys"] or report["unexpected_keys"]:
        return math.inf
    tokens = torch.arange(32).reshape(2, 16)
    with torch.no_grad():
        return float((loaded.eval()(tokens).logits - model.network(tokens).logits).abs().max())


def encoder_differences(spec: JobSpec, out: Path) -> tuple[float, float]:
    """As the two above, of a model that is no causal language model."""
    task = load_task(spec)
    task.open_data()
    batch = task.collate([task.train_data[index] for index in training_order(task.train_data, range(4), seed=3)])
    torch.manual_seed(1)
    model: Any = task.build_model().eval()
    inputs = their_inputs(spec.task, batch)
    with torch.no_grad():
        returned, theirs = task.evaluate(model, batch), model.network(**inputs)
    own = returned.loss if returned.weight is None else returned.loss / returned.weight
    loaded, report = written(model, task.export, out, getattr(transformers, task._task.auto_class))
    if report["missing_keys"] or report["unexpected_keys"]:
        return float((own - theirs.loss).abs()), math.inf
    with torch.no_grad():
        again = loaded.eval()(**inputs).logits
    return float((own - theirs.loss).abs()), float((again - theirs.logits).abs().max())


def written(model: Any, described: dict[str, Any], out: Path, auto: Any) -> tuple[Any, dict[str, Any]]:
    """What transformers loads from the files that `shoal export` writes of a model, and its report."""
    out.mkdir()
    (out / "config.json").write_text(json.dumps({**described["config"], "dtype": "float32"}))
    own = {id(tensor): name for name, tensor in reversed(model.state_dict(keep_vars=True).items())}  # tied ones once
    tensors = {}
    for name in own.values():
        given = name
        for pattern, replacement in described["renames"]:
            given = re.sub(pattern, replacement, given)
        tensors[given] = model.state_dict()[name].contiguous()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    loaded, report = auto.from_pretrained(out, output_loading_info=True)
    return loaded, report


def rows(names: Iterable[str]) -> Iterator[Row]:
    """One for each family or variant. Forks as many processes as a layout has ranks: the process must have one
    thread."""
    with tempfile.TemporaryDirectory() as folder:
        write_data(Path(folder))
        for name in names:
            family, changes = VARIANTS.get(name, (name, {}))
            place = Path(folder, f"export of {name}")
            if name in MODELS:
                spec = parse_spec(small_spec(name, Path(folder)))
                row = Row(name, *encoder_differences(spec, place))
            else:
                spec = spec_of(family, folder, **changes)
                row = Row(name, loss_difference(spec), export_difference(spec, place))
            layouts = LAYOUTS | {one.describe(): one for one in PRODUCTS.get(name, ())}
            broken = {axis: violations(layout, spec, plan_of(spec)) for axis, layout in layouts.items()}
            row.refused = {axis: found[0].message for axis, found in broken.items() if found}
            allowed = {axis: layout for axis, layout in layouts.items() if not broken[axis]}
            for axis, proof in zip(allowed, prove_layouts(spec, allowed.values()), strict=True):
                if proof.outcome is ProofOutcome.PROVEN:
                    row.differences[axis] = proof.difference
                else:
                    row.wrong[axis] = proof.words
            yield row


def main() -> int:
    """Prints one row per family."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("families", nargs="*", default=[*sorted(FAMILIES), *VARIANTS, *MODELS])
    parser.add_argument("--json", metavar="FILE", help="write the rows to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    print(f"{'family':<24} {'loss':>8} {'export':>8} {' '.join(f'{axis:>8}' for axis in LAYOUTS)}")
    for row in rows(arguments.families):
        found.append(row)
        cells = (f"{row.differences[axis]:8.1e}" if axis in row.differences else f"{'-':>8}" for axis in LAYOUTS)
        more = (f"{name} {value:.1e}" for name, value in row.differences.items() if name not in LAYOUTS)
        print(f"{row.family:<24} {row.loss:8.1e} {row.export:8.1e} {' '.join(cells)}  {', '.join(more)}", flush=True)
        for words in (row.wrong | row.refused).values():
            print(f"    {words}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps([asdict(row) for row in found]), encoding="utf-8")
    is_right = all(
        not row.wrong and max([row.loss, row.export, *row.differences.values()]) <= TOLERANCE for row in found
    )
    print("all as expected" if is_right else f"an axis is wrong, or differs by more than {TOLERANCE:g}")
    return int(not is_right)


if __name__ == "__main__":
    sys.exit(main())
