"""Plans of one's own: a model that tp, pp and cp split trains as one plain process trains it, or is refused by name."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from shoal_workers.contract.layout import Layout, Schedule
from shoal_workers.contract.messages import ExitKind
from shoal_workers.contract.model import ParallelPlan
from shoal_workers.engine.parallel.tensor import checked_plan

sys.path.insert(0, str(Path(__file__).parents[2] / "kit" / "tasks"))
from split_tasks import Decoder, plan_of

sys.path.pop(0)

_BASE: dict[str, Any] = {
    "task": "split_tasks:Split",
    "batch": {"global_size": 4, "micro_size": 2},
    "optimizer": {"lr": 0.01, "clip_norm": 0.2},
    "schedule": {"warmup_steps": 1},
    "stop": {"steps": 3},
    "checkpoint": {"every_steps": None},
    "validation": {"samples": 1},
    "elasticity": {"max_workers": 4},
    "health": {"checksum_every_steps": 1},
    "snapshot": {"enabled": False},
    "seed": 3,
}
TP2 = Layout(tp=2)
PP2_TP2 = Layout(pp=2, tp=2, schedule=Schedule.ONE_F_ONE_B)
CP2 = Layout(cp=2)


def spec(*, sequential: bool = False, plan: dict[str, Any] | None = None, **model: str) -> dict[str, Any]:
    return {**_BASE, "model": model, "plan": plan or plan_of(sequential=sequential)}


def assert_equal(pool_of: Any, plain_run: Any, spec: dict[str, Any], *layouts: Layout) -> None:
    plain = plain_run(spec)
    for layout in layouts:
        seen = pool_of(spec).train(layout)
        assert seen.losses == pytest.approx(plain.losses, abs=2e-6), layout.describe()
        assert seen.norms == pytest.approx(plain.norms, abs=2e-6, rel=2e-6), layout.describe()
        assert seen.validation == pytest.approx(plain.validation, abs=2e-6), layout.describe()
        assert seen.metrics == {step: pytest.approx(values, abs=2e-6) for step, values in plain.metrics.items()}


@pytest.mark.parametrize("kind", ["", "inner"])
def test_plain_parameters_on_a_part_of_the_sequence_get_the_whole_gradient(
    pool_of: Any, plain_run: Any, kind: str
) -> None:
    """Biases of row layers, norms without a style, scales and gates of a block, norms and scales inside a gather."""
    assert_equal(pool_of, plain_run, spec(sequential=True, kind=kind), TP2, PP2_TP2)


_STYLES = plan_of(sequential=True)["tensor"]
_WHOLE_STYLES = plan_of(sequential=False)["tensor"]
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a forward of its own": ("scaled", _WHOLE_STYLES, "'embedding'.*This ScaledTable has a forward of its own"),
    "an adapter": ("adapted", _WHOLE_STYLES, r"'blocks.0.feed_forward.up'.*This Adapted has a forward of its own"),
    "a forward on the module": ("set_forward", _WHOLE_STYLES, "forward that was set on the module"),
    "weight_norm": ("weight_norm", _WHOLE_STYLES, "'weight' by a parametrization"),
    "the old weight_norm": ("old_weight_norm", _WHOLE_STYLES, "computes its weight before each call"),
    "another module": ("", {**_WHOLE_STYLES, "norm": "column"}, "'norm'.*it is a LayerNorm"),
    "a name that is wrong": ("", {**_STYLES, "blocks.*.norm3": "sequence"}, "'blocks.*.norm3'.*no module"),
    "two patterns": ("", {**_WHOLE_STYLES, "blocks.1.attention.out": "row"}, "by two patterns"),
    "a column without a row": ("", {"blocks.*.attention.query": "column"}, "no module the style 'row'"),
    "a row without a column": ("", {"blocks.*.attention.out": "row"}, "no module the style 'column'"),
    "no embedding": ("", {k: v for k, v in _STYLES.items() if k != "embedding"}, "style 'embedding', which splits"),
    "no head": ("", {k: v for k, v in _STYLES.items() if k != "head"}, "style 'head', which gives the loss"),
    "outside of a gather": ("", {k: v for k, v in _STYLES.items() if k != "blocks.*.attention"}, "outside of a"),
    "inside whole": ("", {**_STYLES, "blocks.*": "whole"}, "inside a module with the style 'whole'"),
    "gather twice": ("", {**_STYLES, "blocks.*": "gather"}, "inside a module that has it already"),
    "gather without a row": ("", {**_STYLES, "blocks.*.gate": "gather"}, "no layer in it the style 'row'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_tp_would_compute_otherwise_is_refused_by_name(case: str) -> None:
    kind, styles, words = REFUSED[case]
    with pytest.raises((TypeError, ValueError), match=words):
        checked_plan(Decoder(kind), ParallelPlan.model_validate(plan_of(sequential=False, tensor=styles)))


@pytest.mark.parametrize(
    ("kind", "layout", "words"),
    [
        ("adapted", TP2, "This Adapted has a forward of its own"),
        ("max_norm", Layout(), "'embedding' is an Embedding with max_norm=0.5"),
        ("sparse", Layout(), "'embedding' is an Embedding with sparse=True"),
        ("frequency", CP2, "with scale_grad_by_freq=True"),
    ],
)
def test_a_refusal_is_the_error_of_a_job_before_its_first_step(
    make_job: Any, kind: str, layout: Layout, words: str
) -> None:
    """No sharded model can change its table in a forward pass: that is refused at every size."""
    job = make_job(**spec(kind=kind))
    exits = job.run(job.workers(layout.world_size), layout=layout)
    assert [one.kind for one in exits] == [ExitKind.USER_ERROR] * layout.world_size
    assert all(one.step == 0 and one.error.mistake == "refused" for one in exits)
    assert all(words in one.error.message for one in exits)


@pytest.mark.parametrize(
    ("kind", "sequential"), [("padding_idx", False), ("padded frequency", True), ("frequency", False)]
)
def test_a_split_table_has_the_options_of_a_whole_one(
    pool_of: Any, plain_run: Any, kind: str, sequential: bool
) -> None:
    assert_equal(pool_of, plain_run, spec(sequential=sequential, kind=kind), TP2)


@pytest.mark.parametrize("sequential", [False, True])
@pytest.mark.parametrize("kind", ["hooked", "tied"])
def test_hooks_and_tied_layers_are_kept(pool_of: Any, plain_run: Any, kind: str, sequential: bool) -> None:
    """A tied head needs no style of its own: it gets the one that its weight has."""
    styles = {name: style for name, style in plan_of(sequential=sequential)["tensor"].items() if name != "head"}
    tied = {"tied": {"head.weight": "embedding.weight"}, "tensor": styles} if kind == "tied" else {}
    plan = plan_of(sequential=sequential, **tied)
    assert_equal(pool_of, plain_run, spec(plan=plan, kind=kind), TP2, *([PP2_TP2] if kind == "tied" else []))


LOSSES = ("accuracy", "masked", "smooth", "weighted", "gather", "in place", "z", "other", "own", "shifted", "pooled")


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_may_do_anything_with_logits_that_tp_has_split(pool_of: Any, plain_run: Any, loss: str) -> None:
    """Metrics by argmax, label smoothing, operations that torch cannot do on parts, a Function of its own."""
    ignored = "" if loss == "own" else "some"
    layouts = [TP2, PP2_TP2] if loss in ("accuracy", "gather") else [TP2]
    assert_equal(pool_of, plain_run, spec(sequential=loss == "z", loss=loss, ignored=ignored), *layouts)
