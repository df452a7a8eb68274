"""The table of common mistakes of a task: how torch, Python and Shoal word them, and what the user reads instead.

    recognised by    type and text of the exception, the innermost frame, the phase
    the user reads   the line of the task, what is wrong there, and the way out, in one sentence

tests/dist/process/test_mistakes.py makes each of them with the installed torch. Pure; the worker calls `recognise` with
its own exception (`engine/task/user_code.py`). docs/tasks.md lists the rows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

REFUSED = "refused"
"""Not in the table: Shoal itself has refused something of the task, and says what in its message."""
LAYOUT_REFUSED = "layout_refused"
"""Not in the table: the layout trains another model than one process (engine/proof)."""


class Raised(StrEnum):
    """Where the exception was raised."""

    ANYWHERE = "anywhere"
    ON_ITS_OBJECT = "on_its_object"
    """The error was raised in Shoal's code, by an operation on something that the task returned."""


@dataclass(frozen=True, slots=True)
class Mistake:
    """One row."""

    name: str
    """Stable: in reports of errors and in docs/tasks.md."""
    pattern: re.Pattern[str]
    """Pattern of the error, as `Type: text`."""
    member: str
    """Member of the task whose line is named if no line of the task is on the stack."""
    words: str
    """What follows the line. Groups of the pattern are inserted."""
    phases: tuple[str, ...] = ()
    """Values of `Phase`; empty: any."""
    raised: Raised = Raised.ANYWHERE
    innermost: str = ""
    """Regular expression for `file:function` of the innermost frame; empty: any."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What is known of an exception."""

    text: str
    """`Type: text`."""
    phase: str
    innermost: str
    """`file:function` of the innermost frame."""
    is_in_engine: bool
    """The innermost frame is Shoal's."""


@dataclass(frozen=True, slots=True)
class Recognised:
    name: str
    member: str
    words: str


def recognise(links: Sequence[Seen]) -> Recognised | None:
    """The first row that fits one of the exceptions; None: it is not a common mistake.

    Args:
        links: the exception, then what it was raised from, and so on.
    """
    for seen in links:
        for row in MISTAKES:
            match = row.pattern.search(seen.text)
            if match is not None and _fits(row, seen):
                groups = [group or "" for group in match.groups()]
                return Recognised(row.name, row.member, row.words.format(match.group(0), *groups))
    return None


def _fits(row: Mistake, seen: Seen) -> bool:
    return (
        (not row.phases or seen.phase in row.phases)
        and (row.raised is Raised.ANYWHERE or seen.is_in_engine)
        and (not row.innermost or re.search(row.innermost, seen.innermost) is not None)
    )


_PREPARING = ("preparing",)
_BUILDING = ("building",)
_PASSES = ("forward", "backward", "validating")


def _row(
    name: str,
    pattern: str,
    member: str,
    words: str,
    *,
    phases: tuple[str, ...] = (),
    raised: Raised = Raised.ANYWHERE,
    innermost: str = "",
) -> Mistake:
    return Mistake(name, re.compile(pattern), member, words, phases, raised, innermost)


MISTAKES: tuple[Mistake, ...] = (
    # importing and constructing the task
    _row(
        "missing_package",
        r"^ModuleNotFoundError: No module named '([^']+)'",
        "__init__",
        "the module {1} is not there on the node of this worker; install its package on every node, or put the module "
        "into the directory that code.working_dir names.",
    ),
    _row(
        "missing_variable",
        r"^KeyError: '([^']*)'",
        "__init__",
        "the environment variable {1} is not set in this worker, which has the environment of its node, not of your "
        "shell; pass the value in the model or data section of the spec, or read os.environ.get({1!r}, DEFAULT).",
        innermost=r"os(\.py|>):__getitem__$",
    ),
    _row(
        "script",
        r"^SystemExit: ?(.*)",
        "__init__",
        "the module ended itself (sys.exit, argparse), as a script does; the spec's task must name a class, so put "
        'what the script runs below `if __name__ == "__main__":`, and the model, data and loss into a class.',
        phases=_PREPARING,
    ),
    _row(
        "relative_path",
        r"^FileNotFoundError: .*No such file or directory: '(?!/)(?!\w+://)([^']+)'",
        "build_dataset",
        "there is no file {1} in the directory of this worker, which is a copy of code.working_dir; put the file "
        "there, or give an absolute path that exists on every node.",
    ),
    _row(
        "signal_handler",
        r"^ValueError: signal only works in main thread",
        "__init__",
        "signal.signal() needs the main thread of a process, and a task runs on another one in every worker; leave it "
        "out: on SIGTERM Shoal itself lets the group go on without the worker, and it writes the checkpoints.",
    ),
    _row(
        "no_group",
        r"^ValueError: Default process group has not been initialized",
        "__init__",
        "torch.distributed has no group while a worker prepares; leave it out: every worker prepares the same task for "
        "itself, and Shoal chooses which samples each one reads.",
        phases=_PREPARING,
    ),
    # its data
    _row(
        "dataset_without_length",
        r"^TypeError: object of type '(\w+)' has no len\(\)",
        "build_dataset",
        "build_dataset() returns an object of type {1}, which has no len(), but Shoal itself chooses which samples are "
        "read; return a map-style dataset, with __len__ and __getitem__, not an iterable one, a generator or a loader.",
        phases=_PREPARING,
        raised=Raised.ON_ITS_OBJECT,
    ),
    _row(
        "dataset_without_index",
        r"^(?:TypeError: '(\w+)' object is not subscriptable|NotImplementedError: Subclasses of Dataset should "
        r"implement __getitem__|KeyError: (\d+)$)",
        "build_dataset",
        "build_dataset() returns an object without samples by index ({0}); give it a __getitem__ that returns sample i "
        "for every i from 0 to len() - 1.",
        phases=_PASSES,
        raised=Raised.ON_ITS_OBJECT,
    ),
    _row(
        "dataset_signature",
        r"^TypeError: (?:[\w<>]+\.)*(__len__|__getitem__)\(\) (?:takes|missing) .*",
        "build_dataset",
        "the dataset cannot be read: {0}; write def __len__(self) and def __getitem__(self, index).",
        raised=Raised.ON_ITS_OBJECT,
    ),
    _row(
        "samples_of_different_sizes",
        r"^RuntimeError: stack expects each tensor to be equal size, but got (\[.*?\]) at entry \d+ and (\[.*?\])",
        "build_dataset",
        "samples of one micro-batch have the sizes {1} and {2}, and cannot be stacked; pad or cut them to one size, or "
        "define collate(self, samples) in the task.",
        phases=_PASSES,
    ),
    _row(
        "samples_that_are_no_tensors",
        r"^TypeError: default_collate: batch must contain .*; found <class '([^']+)'>",
        "build_dataset",
        "a sample contains an object of type {1}, which cannot be batched; return tensors, numbers, or dicts and "
        "tuples of them, or define collate(self, samples) in the task.",
        phases=_PASSES,
    ),
    # its model
    _row(
        "container_without_forward",
        r"^ValueError: fully_shard does not support containers that do not implement forward: (\w+)",
        "build_model",
        "a {1} has no forward(), and parameters are gathered when a module is called; return an nn.Sequential or a "
        "module with a forward() from build_model() and from shard_units().",
        phases=_BUILDING,
    ),
    _row(
        "torch_script",
        r"^AttributeError: '_CachedForward' object has no attribute|\bRecursiveScriptModule\b|\bScriptModule\b",
        "build_model",
        "the model is TorchScript (torch.jit), whose modules cannot be sharded; return the module as it was before "
        "torch.jit.script or torch.jit.trace, and set compile: true in the spec if it should be compiled.",
        phases=_BUILDING,
    ),
    _row(
        "scalar_parameter",
        r"^ValueError: fully_shard doesn't support scalar parameters\. Change (\S+) to",
        "build_model",
        "the parameter {1} has no dimension and cannot be sharded; give it one element, for example "
        "nn.Parameter(torch.ones(1)).",
        phases=_BUILDING,
    ),
    _row(
        "lazy_module",
        r"\b[Uu]ninitialized ?[Pp]arameter\b",
        "build_model",
        "the model has lazy modules (nn.LazyLinear and the like), whose parameters have no shape until a first forward "
        "pass; give the sizes, or pass one sample through the model before build_model() returns it.",
        phases=_BUILDING,
    ),
    _row(
        "sparse_gradient",
        r"^NotImplementedError: Could not run '\S+' with arguments from the 'Sparse\w+' backend",
        "build_model",
        "a parameter has a sparse gradient, which cannot be summed over workers; leave out sparse=True where the model "
        "looks up an embedding.",
        phases=("backward", "optimizer"),
    ),
    _row(
        "optimizer_on_shards",
        r"^(?:RuntimeError|NotImplementedError): (?:Operator )?(aten\.[\w.]+?\w)\.?:? "
        r"(?:in-place operations that require placement changes|does not have a sharding strategy)",
        "build_optimizer",
        "the optimizer uses {1}, which torch does not have for parameters that are split over workers (DTensor); if it "
        "updates each element on its own, set elementwise_optimizer = True in the task, else write that operation "
        "another way, for example not in place.",
        phases=("optimizer",),
    ),
    # its loss
    _row(
        "part_of_the_model",
        r"got mixed torch\.Tensor and DTensor",
        "loss",
        "a part of the model is called, or a parameter is used, outside a call of the whole model, where parameters "
        "are sharded; call model(...), and move what needs single layers into its forward().",
        phases=_PASSES,
    ),
    _row(
        "detached_loss",
        r"element 0 of tensors does not require grad and does not have a grad_fn",
        "loss",
        "loss() returns a tensor that does not depend on the model's parameters, so there is no gradient; do not "
        "detach it, do not compute it under torch.no_grad(), and do not make it from a number (.item(), numpy).",
        phases=("backward",),
    ),
    _row(
        "backward_in_the_task",
        r"^RuntimeError: Trying to backward through the graph a second time",
        "loss",
        "loss() itself calls backward(), or keeps a graph of an earlier call; return the loss only, since Shoal runs "
        "the backward pass and the optimizer.",
        phases=("backward",),
    ),
    _row(
        "label_out_of_range",
        r"^IndexError: Target (-?\d+) is out of bounds",
        "loss",
        "the label {1} has no output of the model; give the model as many outputs as there are classes, and number the "
        "classes from 0.",
        phases=_PASSES,
    ),
    _row(
        "index_out_of_range",
        r"^IndexError: index out of range in self",
        "loss",
        "an index is outside an nn.Embedding; give it as many rows as there are tokens, and number the tokens from 0.",
        phases=_PASSES,
    ),
    _row(
        "shapes",
        r"mat1 and mat2 shapes cannot be multiplied \((\w+) and (\w+)\)",
        "loss",
        "a layer that takes {2} cannot take an input of {1} (rows x columns); its in_features must be the last "
        "dimension of its input.",
        phases=_PASSES,
    ),
    _row(
        "dtypes",
        r"mat1 and mat2 must have the same dtype, but got (\w+) and (\w+)",
        "loss",
        "the input of a layer is {1} and its weights are {2}; convert the input, for example with .float(), in "
        "build_dataset() or before model(...).",
        phases=_PASSES,
    ),
)
