"""The kinds of pieces and optimizers that tasks are drawn of, and the choices of each; the plain choice comes first.

Pure data: pieces.py and optimizers.py build them. A new kind is a line here and a class or a case there.
"""

from __future__ import annotations

from typing import Any

_Choices = dict[str, tuple[Any, ...]]

PIECES: dict[str, _Choices] = {
    "linear": {"bias": (True, False)},
    "branches": {"by": ("parity", "rare", "chance"), "both": (False, True)},
    "skipped": {"by": ("parity", "rare", "chance")},
    "by_sample": {"empty": (False, True)},
    "unused": {},
    "frozen": {"what": ("all", "bias", "weight")},
    "no_grad": {},
    "tied_inside": {},
    "tied_to_first": {},
    "twice": {},
    "batch_norm": {"affine": (True, False), "momentum": (0.1, None, 0.5), "tracks": (True, False)},
    "instance_norm": {"tracks": (True, False)},
    "norm": {"kind": ("layer", "rms", "group")},
    "ema": {"in_place": (True, False), "persistent": (True, False)},
    "counter": {},
    "late": {},
    "derived_buffer": {"of": ("weight", "constant")},
    "derived_attribute": {"kind": ("tensor", "number")},
    "constant_buffer": {"persistent": (True, False)},
    "shared_buffer": {},
    "weight_norm": {"old": (False, True)},
    "orthogonal": {},
    "spectral_norm": {},
    "own_parametrization": {},
    "hooks": {"kind": ("forward", "pre", "backward", "output")},
    "parameter_hook": {"kind": ("gradient", "accumulated")},
    "recompute": {"reentrant": (False, True), "branch": (False, True)},
    "recurrent": {"kind": ("rnn", "gru", "lstm"), "layers": (1, 2)},
    "attention": {"kind": ("own", "multihead", "encoder")},
    "convolution": {},
    "other_dtype": {"dtype": ("float64", "bfloat16", "float16", "complex64")},
    "shapes": {"kind": ("prime", "one", "scalar", "empty", "transposed", "three")},
    "collections": {"kind": ("list", "dict")},
    "dropout": {"p": (0.2, 0.5)},
    "lookup": {"option": ("plain", "padding_idx", "max_norm", "scale_grad_by_freq", "sparse", "bag")},
    "borrowed": {},
    "own_function": {},
    "nested_outputs": {"kind": ("tuple", "dict")},
    "noise": {"kind": ("torch", "numpy", "python")},
    "lazy": {},
    "double_backward": {},
    "inner_list": {"skips": (False, True)},
}

SIZES = (4, 0, 1, (64 << 8) - 1, 64 << 8, (64 << 8) + 1, (1 << 17) + 1, (1 << 18) - 1, 1 << 18)
"""Elements of float32: few, none, one, around 64 KiB, above a piece of an exact sum, and around 1 MiB, the size of a
first bucket of gradients and of a sum that is made directly."""
WRITINGS = ("in_place", "slice", "copy", "data", "data_slice", "data_assigned", "replaced")

SPELLINGS: dict[str, _Choices] = {
    "sized_buffer": {"size": SIZES, "written": WRITINGS},
    "sized_parameter": {"size": SIZES},
    "written_parameter": {"written": ("no_grad", "data", "data_assigned", "data_copied", "once")},
    "reached": {"by": ("attribute", "list", "tuple", "dict", "closure", "data", "detached_buffer", "computed")},
    "carried": {"in": ("buffer", "tensor", "tuple", "list", "dict")},
    "number": {},
    "hidden": {"what": ("module_in_a_list", "made_in_forward", "replaced_in_forward", "unfrozen")},
}
"""Pieces that are of a drawn size, or that write or reach a thing in a drawn way."""
LOSSES = ("penalty", "carried_by_task")
"""Spellings of a loss."""
ALL_PIECES = {**PIECES, **SPELLINGS}

_OPTIONS: dict[str, _Choices] = {
    "sgd": {"momentum": (0.0, 0.9), "nesterov": (False, True), "weight_decay": (0.0, 0.1), "foreach": (None, True)},
    "adam": {"amsgrad": (False, True), "weight_decay": (0.0, 0.1), "foreach": (None, True, False)},
    "adamw": {"amsgrad": (False, True), "maximize": (False,), "fused": (None, True)},
    "nadam": {},
    "radam": {},
    "adamax": {},
    "adadelta": {},
    "adagrad": {"lr_decay": (0.0, 0.1), "initial_accumulator_value": (0.0, 0.1)},
    "rmsprop": {"centered": (False, True), "momentum": (0.0, 0.5)},
    "rprop": {},
    "asgd": {},
    "adafactor": {},
    "muon": {},
    "lbfgs": {},
    "own_damped": {"declared": (None, False, True)},
    "own_whole": {},
    "own_group_state": {},
    "own_late_state": {},
    "own_noisy": {},
    "own_anchored": {},
    "own_keeping": {"in": ("attribute", "dict", "hook", "generator", "inner", "state", "group")},
    "own_number": {},
}
OPTIMIZERS: dict[str, _Choices] = {kind: {"declared": (None, False), **options} for kind, options in _OPTIONS.items()}
"""Declared: what the task says of `elementwise_optimizer`; None means nothing."""
