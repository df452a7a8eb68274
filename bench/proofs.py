"""The table of plans proven and refused: `make bench-proofs`.

Built-in models on all axes and some products of them, the example of a user's plan, and wrong plans (tests/kit/tasks).
Each layout runs in forked processes on this machine. The exit status is 0 if every right plan is proven, every wrong
one is refused on the axis that it is wrong on, and the model of 10 M parameters takes at most 2 s for each layout.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.extend(str(ROOT / name) for name in ("tests", "tests/kit/tasks", "examples/user-plan"))

import yaml  # noqa: E402

from kit.tasks.planned_tasks import RIGHT, WRONG, spec_of  # noqa: E402
from shoal_workers.contract.checks.spec_errors import parse_spec  # noqa: E402
from shoal_workers.contract.layout import ContextMethod, Layout, Schedule  # noqa: E402
from shoal_workers.contract.proofs import LayoutProof, ProofOutcome  # noqa: E402
from shoal_workers.contract.spec import JobSpec  # noqa: E402
from shoal_workers.proofs import layouts_to_prove, prove_layouts  # noqa: E402

_LIMIT_S = 2.0
_PRODUCTS = (
    Layout(pp=2, tp=2),
    Layout(cp=2, tp=2),
    Layout(pp=2, dp_shard=2),
    Layout(cp=2, context=ContextMethod.ULYSSES),
    Layout(pp=2, schedule=Schedule.ZERO_BUBBLE_V, stages=(1, 1, 1, 1)),
)
_SMALL = {"dim": 64, "num_layers": 4, "num_heads": 4, "seq_len": 32}
_MODELS: dict[str, tuple[dict[str, Any], tuple[Layout, ...]]] = {
    "dense, tied head": (_SMALL, _PRODUCTS),
    "dense, own head": ({**_SMALL, "tied_head": False}, ()),
    "experts, bias": ({**_SMALL, "num_experts": 4}, (Layout(dp_shard=2, ep=2, tp=2),)),
    "experts, loss": ({**_SMALL, "num_experts": 4, "balance": "loss", "num_shared_experts": 1}, ()),
    "10 M parameters": ({"dim": 320, "num_layers": 8, "num_heads": 8, "seq_len": 128}, ()),
}


def cases(folder: str) -> Iterator[tuple[str, JobSpec, tuple[Layout, ...], str]]:
    """Name, spec, layouts, and the layout that must be refused."""
    text = {"corpus": "python-stdlib", "max_bytes": 200_000, "cache_dir": folder}
    batch = {"global_size": 8, "micro_size": 2}
    for name, (model, more) in _MODELS.items():
        spec = parse_spec({"stop": {"steps": 1}, "batch": batch, "data": text, "model": model})
        yield name, spec, (*layouts_to_prove(spec), *more), ""
    example = yaml.safe_load((ROOT / "examples" / "user-plan" / "waves.yaml").read_text())
    spec = parse_spec(example)
    yield "examples/user-plan", spec, layouts_to_prove(spec), ""
    for kind in (*RIGHT, *WRONG):
        spec = parse_spec(spec_of(kind))
        yield f"own plan: {kind or 'right'}", spec, layouts_to_prove(spec), WRONG.get(kind, "")


def main() -> int:
    """Prints one row per layout."""
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        print(f"{'plan':<22} {'layout':<20} {'outcome':<9} {'s':>5}  largest difference, or why")
        for name, spec, layouts, wrong in cases(folder):
            found = list(prove_layouts(spec, layouts))
            for proof in found:
                _print(name, proof)
            refused = {proof.layout.describe() for proof in found if proof.outcome is not ProofOutcome.PROVEN}
            if (wrong not in refused) if wrong else refused:
                failed.append(f"{name}: {', '.join(sorted(refused)) or 'nothing'} refused, expected {wrong or 'none'}")
            if name.startswith("10 M") and max(proof.seconds for proof in found) > _LIMIT_S:
                failed.append(f"{name}: a proof took more than {_LIMIT_S:g} s")
    print("\n".join(failed) or "all as expected")
    return bool(failed)


def _print(name: str, proof: LayoutProof) -> None:
    why = f"{proof.difference:.1e}" if proof.outcome is ProofOutcome.PROVEN else proof.words
    layout = proof.layout
    kind = f" {layout.schedule}" if layout.pp > 1 else f" {layout.context}" if layout.cp > 1 else ""
    row = f"{name:<22} {layout.describe() + kind:<20} {proof.outcome:<9} {proof.seconds:>5.2f}  {why}"
    print(row, flush=True)


if __name__ == "__main__":
    sys.exit(main())
