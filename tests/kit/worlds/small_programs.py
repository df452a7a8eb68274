"""The small programs of docs/programs.md: each trains as a plain loop does, or is refused with a sentence.

Pure: the page is made of these rows (tools/programs_page.py), and tests/dist/tasks/test_small_programs.py runs each.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Row:
    """One program."""

    words: str
    """What it does, for the page."""
    task: str
    spec: Mapping[str, Any] = field(default_factory=dict)
    """Sections of its spec that differ from `SPEC`."""
    whole: bool = False
    """The plain loop takes the global batch as one micro-batch."""
    tolerance: float = 1e-6
    refused: str = ""
    """Words of the message. Empty: it trains."""
    setting: str = ""
    """What the page says of the spec."""


SPEC: dict[str, Any] = {
    "batch": {"global_size": 12, "micro_size": 2},
    "optimizer": {"lr": 0.02, "clip_norm": 0.5, "eps": 1e-3},
    "schedule": {"warmup_steps": 1},
    "stop": {"steps": 5},
    "checkpoint": {"every_steps": None},
    "validation": {"samples": 0},
    "elasticity": {"max_workers": 2},
    "seed": 7,
}
GLOBAL = {"batch": {**SPEC["batch"], "sync": "global"}}


def _named(**section: Any) -> dict[str, Any]:
    optimizer = {**SPEC["optimizer"], **section}
    if "name" in section:  # eps is a setting of Adam's kind
        del optimizer["eps"]
    return {"optimizer": optimizer}


def _p(name: str) -> str:
    return f"small_programs:{name}"


TRAINED: tuple[Row, ...] = (
    Row("a classifier: layers, a mean loss, AdamW with weight decay, clipping, warm-up and cosine", _p("Program")),
    Row("metrics beside the loss", _p("Metrics")),
    Row("a mean over tokens of samples of different lengths: `(sum, weight)`", _p("Tokens")),
    Row("dropout", _p("Dropout")),
    Row("noise that the loss draws", _p("Noise")),
    Row("a convolution with `channels_last` and GroupNorm", _p("Convolutional")),
    Row("BatchNorm, each micro-batch on its own", _p("Norm")),
    Row("BatchNorm over the global batch", _p("Norm"), GLOBAL, whole=True, setting="batch: {sync: global}"),
    Row("`convert_sync_batchnorm(model)`", _p("SyncNorm"), GLOBAL, whole=True, setting="batch: {sync: global}"),
    Row("buffers: a moving average that the output depends on, and a counter", _p("Buffers")),
    Row("tied weights: an embedding that is the head too", _p("TiedWeights")),
    Row("a frozen layer", _p("Frozen")),
    Row(
        "groups of parameters: another rate for biases, no decay for the head",
        _p("Program"),
        _named(groups=[{"match": "*.bias", "lr_factor": 2.0}, {"match": "2.*", "weight_decay": 0.0}]),
        setting="optimizer.groups",
    ),
    Row("a scalar parameter (temperature)", _p("Scalar")),
    Row("an empty and a transposed parameter", _p("EmptyAndTransposed")),
    Row("a float64 parameter beside float32", _p("Double")),
    Row("a complex parameter beside real ones", _p("Complex")),
    Row("a bfloat16 parameter beside float32", _p("Half"), tolerance=4e-3),
    Row("branches by sample, and a head that is first used late", _p("Branches")),
    Row("one block that is used three times", _p("Repeated")),
    Row("two calls of the model in one loss (siamese networks)", _p("Siamese")),
    Row("a gradient penalty, which differentiates twice", _p("Penalty")),
    Row("`torch.utils.checkpoint` in the model", _p("Recomputed")),
    Row("`weight_norm` and other parametrizations", _p("WeightNorm")),
    Row("`nn.TransformerEncoderLayer`", _p("Transformer")),
    Row("`nn.LSTM`", _p("Lstm")),
    Row("distillation from a frozen teacher", _p("Distillation")),
    Row("an `autograd.Function` of its own", _p("OwnFunction")),
    Row("a gradient hook", _p("Hooked")),
    Row("a variational autoencoder", _p("Variational")),
    Row("`build_optimizer` with groups of its own", _p("OwnOptimizer")),
    Row("SGD with Nesterov momentum", _p("Program"), _named(name="sgd", args={"momentum": 0.9, "nesterov": True})),
    Row("Lion", _p("Program"), _named(name="lion", lr=0.003)),
    Row("a class of torch by its path", _p("Program"), _named(name="torch.optim.RAdam", weight_decay=0.0)),
    Row("an average of the weights (EMA)", _p("Program"), _named(ema_decay=0.9)),
    Row(
        "a scheduler class of torch",
        _p("Program"),
        {"schedule": {"name": "torch.optim.lr_scheduler.ExponentialLR", "args": {"gamma": 0.8}}},
    ),
    Row("`collate` of its own", _p("Collated")),
    Row("an order of its own (`samples_at`)", _p("OwnOrder")),
    Row("a contrastive loss of the whole batch (`embed`, `batch_loss`)", _p("Contrastive"), tolerance=1e-5),
    Row("a GAN: alternating updates (`training_step`)", _p("Gan")),
    Row("two updates of a critic for each one of an actor", _p("Critics")),
)

REFUSED: tuple[Row, ...] = (
    Row("`training_step` without `optimizers`", _p("NoPatterns"), refused="Name them with the parameters that each"),
    Row("a parameter that no optimizer of `training_step` has", _p("Unowned"), refused="belongs to none of the"),
    Row("a parameter that two optimizers have", _p("TwoOwners"), refused="belongs to the optimizers d and g"),
    Row("several optimizers from `build_optimizer`", _p("TwoOptimizers"), refused="A task has one optimizer"),
    Row("LBFGS", _p("Lbfgs"), refused="Return an optimizer whose step() needs none"),
    Row("`nn.Embedding(sparse=True)`", _p("Sparse"), refused="sparse=True"),
    Row("`nn.Embedding(max_norm=...)`", _p("Clamped"), refused="Scale its output in forward() instead"),
    Row("a buffer with `persistent=False` that changes", _p("Forgotten"), refused="Register it with persistent=True"),
    Row("BatchNorm over the global batch, and dropout", _p("NormAndDropout"), GLOBAL, refused="draws random numbers"),
    Row("`SyncBatchNorm` without `batch.sync: global`", _p("SyncNorm"), refused="Set batch.sync to global"),
    Row("an iterable dataset", "mistaken_tasks:Stream", refused="map-style dataset"),
    Row("a lazy layer that nothing has called", "mistaken_tasks:LazyLayer", refused="before build_model() returns"),
    Row("TorchScript", "mistaken_tasks:Scripted", refused="before torch.jit.script"),
    Row("an expanded parameter", "mistaken_tasks:ExpandedParameter", refused="build it with .clone()"),
    Row("two parameters that share memory", "mistaken_tasks:SharedMemory", refused="Assign the same nn.Parameter"),
    Row("`DistributedDataParallel`", "mistaken_tasks:Replicated", refused="Return the plain module"),
    Row("`all_gather` in the loss", "mistaken_tasks:Negatives", refused="Compute over the micro-batch"),
    Row("`backward()` in the loss", "mistaken_tasks:Twice", refused="return the loss only"),
    Row("a layer that is called without the model", "mistaken_tasks:PartOfTheModel", refused="call model(...)"),
)


def table() -> str:
    """The list and the table of docs/programs.md."""
    lines = ["Equal to a plain loop, a program that has", "", *(f"- {_with_setting(row)}" for row in TRAINED)]
    lines += ["", "Refused:", "", "| a program that has | the message contains |", "|---|---|"]
    lines += [f"| {_with_setting(row)} | *{row.refused}* |" for row in REFUSED]
    return "\n".join(lines) + "\n"


def _with_setting(row: Row) -> str:
    return f"{row.words}, with {setting}" if (setting := _setting(row)) else row.words


def _setting(row: Row) -> str:
    if row.setting:
        return f"`{row.setting}`"
    optimizer = row.spec.get("optimizer", {})
    if "name" in optimizer:
        return f"`optimizer.name: {optimizer['name']}`"
    if "ema_decay" in optimizer:
        return "`optimizer.ema_decay`"
    if "schedule" in row.spec:
        return "`schedule.name`"
    return "`batch: {sync: global}`" if row.spec == GLOBAL else ""
