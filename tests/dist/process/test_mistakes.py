"""Common mistakes of a task, made for real: each ends in a sentence with the task's line and the way out."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kit.processes.warm import warm_python
from shoal_workers.contract.exception_causes import MISTAKES, REFUSED
from shoal_workers.contract.messages import ExitKind

KIT = Path(__file__).parents[2] / "kit"
FILE = KIT / "tasks" / "mistaken_tasks.py"

# class -> the mistake, the member whose line is named, words of the way out
MADE: dict[str, tuple[str, str, str]] = {
    "ListOfLayers": ("container_without_forward", "build_model", "nn.Sequential"),
    "Scripted": ("torch_script", "build_model", "before torch.jit.script"),
    "LazyLayer": ("lazy_module", "build_model", "before build_model() returns"),
    "Closure": (REFUSED, "build_optimizer", "whose step() needs none"),
    "Factored": ("optimizer_on_shards", "build_optimizer", "elementwise_optimizer = True"),
    "SparseGradient": ("sparse_gradient", "build_model", "leave out sparse=True"),
    "ExpandedParameter": (REFUSED, "build_model", "build it with .clone()"),
    "SparseParameter": (REFUSED, "build_model", ".to_dense()"),
    "SharedMemory": (REFUSED, "build_model", "Assign the same nn.Parameter"),
    "Frozen": (REFUSED, "build_model", "leave requires_grad on"),
    "Stream": ("dataset_without_length", "build_dataset", "in a loop, with run.batches(...)"),
    "Generated": ("dataset_without_length", "build_dataset", "return a map-style dataset"),
    "SizedStream": (REFUSED, "build_dataset", "in a loop, with run.batches(...)"),
    "Loader": (REFUSED, "build_dataset", "return a map-style dataset"),
    "NoIndex": ("dataset_without_index", "build_dataset", "__getitem__"),
    "KeyedSamples": ("dataset_without_index", "build_dataset", "__getitem__"),
    "Ragged": ("samples_of_different_sizes", "build_dataset", "collate(self, samples)"),
    "Words": ("samples_that_are_no_tensors", "build_dataset", "collate(self, samples)"),
    "RelativePath": ("relative_path", "build_dataset", "absolute path"),
    "PartOfTheModel": ("part_of_the_model", "loss", "call model(...)"),
    "OnWeights": ("part_of_the_model", "loss", "call model(...)"),
    "Detached": ("detached_loss", "loss", "do not detach"),
    "NoGradient": ("detached_loss", "loss", "torch.no_grad()"),
    "Twice": ("backward_in_the_task", "loss", "return the loss only"),
    "WrongLabels": ("label_out_of_range", "loss", "as many outputs"),
    "TooManyTokens": ("index_out_of_range", "loss", "as many rows"),
    "WrongShape": ("shapes", "loss", "in_features"),
    "IntegerInputs": ("dtypes", "loss", ".float()"),
    "MissingPackage": ("missing_package", "build_model", "a_package_that_nobody_has"),
    "MissingVariable": ("missing_variable", "build_dataset", "DIGITS_LENGTH"),
    "EmptyTrain": (REFUSED, "build_dataset", "at least one sample"),
    "EmptyDirectory": (REFUSED, "build_dataset", "at least one sample"),
    "NothingBuilt": (REFUSED, "build_model", "return model"),
    "NumberLoss": (REFUSED, "loss", "must return a scalar tensor"),
    "NotReduced": (REFUSED, "loss", "must return a scalar tensor"),
    "NoArguments": (REFUSED, "__init__", "def __init__(self, model, data, seed)"),
    # a signature that Shoal's call does not fit
    "NoSplit": (REFUSED, "build_dataset", "Write def build_dataset(self, split)."),
    "NoBatch": (REFUSED, "loss", "Write def loss(self, model, batch)."),
    "WidthToBuild": (REFUSED, "build_model", "Write def build_model(self)."),
    "KeywordSamples": (REFUSED, "collate", "Write def collate(self, samples)."),
    "IndexLeftOut": ("dataset_signature", "build_dataset", "def __getitem__(self, index)"),
    "LengthOfWhat": ("dataset_signature", "build_dataset", "def __len__(self)"),
    # results
    "NumberAsUnits": (REFUSED, "shard_units", "gathered together"),
    "NothingDescribed": (REFUSED, "export_config", '"config" and "renames"'),
    "WhereOfOptimizer": (REFUSED, "build_optimizer", "not a torch.optim.Optimizer"),
    # torch.distributed
    "Negatives": (REFUSED, "gathered", "Compute over the micro-batch"),
    "SwallowedNegatives": (REFUSED, "gathered", "Compute over the micro-batch"),
    "DifferentiableNegatives": (REFUSED, "gathered", "Compute over the micro-batch"),
    "FunctionalNegatives": (REFUSED, "gathered", "Compute over the micro-batch"),
    "ObjectNegatives": (REFUSED, "gathered", "Compute over the micro-batch"),
    "OnAnotherThread": (REFUSED, "gathered", "Compute over the micro-batch"),
    "ForwardWithBarrier": (REFUSED, "forward", "the collective barrier()"),
    "BackwardWithSum": (REFUSED, "backward", "the collective all_reduce()"),
    "HookWithSum": (REFUSED, "sum_up", "the collective all_reduce()"),
    "CollateWithBroadcast": (REFUSED, "collate", "the collective broadcast()"),
    "StepWithSum": (REFUSED, "step", "full_tensor()"),
    "ScaledByWorkers": (REFUSED, "loss", "Shoal itself averages"),
    "SampledByRank": (REFUSED, "build_dataset", "get_world_size()"),
    "CutByRank": ("no_group", "build_dataset", "Shoal chooses which samples"),
    "OwnGroup": (REFUSED, "build_model", "Shoal itself forms the groups"),
    "Replicated": (REFUSED, "build_model", "Return the plain module"),
    "SyncNorm": (REFUSED, "build_model", "Set batch.sync to global"),
    # settings of the process
    "GradientsLeftOff": (REFUSED, "loss", "with torch.no_grad():"),
    "InferenceLeftOn": (REFUSED, "build_model", "with torch.inference_mode():"),
    "DeviceLeft": (REFUSED, "__init__", "device=batch.device"),
    "DtypeLeft": (REFUSED, "loss", "where the module is imported"),
    "AutocastLeft": (REFUSED, "loss", "precision: bf16"),
    "OwnHandler": ("signal_handler", "__init__", "in the main thread only"),
}
OTHERS = {
    "mistaken_tasks:NumberAsCollate": (REFUSED, "NumberAsCollate.collate is 5"),
    "mistaken_tasks:NoModelToDescribe": (REFUSED, "Write def export_config(self, model)."),
    "mistaken_tasks:train": (REFUSED, "is a function, not a class"),
    "mistaken_tasks:NoLoss": (REFUSED, "lacks build_dataset() and loss()"),
    "mistaken_tasks:Missing": (REFUSED, "has no 'Missing'"),
    "script_task:Task": ("script", "__main__"),
    "nowhere:Task": (REFUSED, "code.working_dir"),
}
HALF_AND_EXACT = {"deterministic": True, "precision": "bf16"}
"""Only then does FSDP itself read a block that was not used."""
FINE = tuple(
    f"mistaken_tasks:{name}"
    for name in (
        "Right",
        "UnusedParameters",
        "NestedLists",
        "PrintsOnRankZero",
        "FullTensors",
        "OwnSettings",
        "Decorated",
    )
)


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    """By task. All of them are tried in one process, since most of their time is the import of torch."""
    tried: list[list[Any]] = [[f"mistaken_tasks:{name}", {}] for name in MADE]
    tried += [[task, {}] for task in (*OTHERS, "mistaken_tasks:Typo", *FINE)]
    tried.append(["mistaken_tasks:NotANumberInValidation", {}])
    tried.append(["mistaken_tasks:UnusedBlock", HALF_AND_EXACT])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(KIT / "tasks"), *sys.path])}
    environment.pop("DIGITS_LENGTH", None)
    command = [warm_python(), str(KIT / "tasks" / "try_tasks.py"), json.dumps(tried)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return dict(zip((task for task, _ in tried), json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("name", MADE)
def test_the_message_names_the_line_what_is_wrong_and_the_way_out(answers: dict[str, Any], name: str) -> None:
    mistake, member, way_out = MADE[name]
    report = answers[f"mistaken_tasks:{name}"]
    assert (report["kind"], report["mistake"]) == (ExitKind.USER_ERROR, mistake), report
    assert report["sentence"] == report["message"] and "\n" not in report["message"]
    assert way_out in report["message"], report["message"]
    line = re.search(r"\bmistaken_tasks\.py:(\d+)\b", report["message"])
    assert line is not None, report["message"]
    written = FILE.read_text().splitlines()
    above = [text for text in written[: int(line[1])] if text.lstrip().startswith(("class ", "def "))]
    assert f"def {member}(" in above[-1], (above[-1], report["message"])


@pytest.mark.parametrize("task", OTHERS)
def test_a_task_that_cannot_be_loaded_is_refused_in_words(answers: dict[str, Any], task: str) -> None:
    mistake, words = OTHERS[task]
    report = answers[task]
    assert (report["kind"], report["mistake"], report["phase"]) == (ExitKind.USER_ERROR, mistake, "preparing"), report
    assert words in report["message"]


def test_every_row_of_the_table_is_made_here() -> None:
    made = {mistake for mistake, *_ in (*MADE.values(), *OTHERS.values())}
    assert made == {row.name for row in MISTAKES} | {REFUSED}


def test_the_traceback_of_a_common_mistake_has_only_lines_of_the_task(answers: dict[str, Any]) -> None:
    traceback = answers["mistaken_tasks:PartOfTheModel"]["traceback"]
    files = re.findall(r'File "([^"]+)"', traceback)
    assert files and {Path(file).name for file in files} == {"mistaken_tasks.py"}
    assert traceback.rstrip().endswith("before calling distributed operators!"), "torch's own words are kept"


def test_any_other_exception_is_named_with_its_line(answers: dict[str, Any]) -> None:
    report = answers["mistaken_tasks:Typo"]
    assert re.fullmatch(
        r"NameError: name 'lables' is not defined \(mistaken_tasks\.py:\d+ in loss\(\)\)", report["sentence"]
    )
    assert report["mistake"] == ""


def test_what_works_is_measured(answers: dict[str, Any]) -> None:
    found = answers["mistaken_tasks:Right"]
    assert found["parameters"] == 4 * 8 + 8 + 8 * 8 + 8 + 8 * 3 + 3
    assert found["checkpoint_bytes"] > 3 * 4 * found["parameters"], "parameters and two moments"
    assert 0 < found["micro_batch_s"] < 60 and found["memory_bytes"] > 1 << 26
    assert found["last_loss"] != found["loss"] and found["val_loss"] > 0 and found["remarks"] == []
    assert "kind" not in answers["mistaken_tasks:NestedLists"]


def test_a_decorator_may_add_arguments(answers: dict[str, Any]) -> None:
    assert "kind" not in answers["mistaken_tasks:Decorated"]


def test_a_validation_loss_that_is_not_finite_is_remarked(answers: dict[str, Any]) -> None:
    found = answers["mistaken_tasks:NotANumberInValidation"]
    assert (found["val_loss"], found["remarks"]) == (None, ["the validation loss is nan, which is not finite."])


def test_parameters_without_a_gradient_are_named(answers: dict[str, Any]) -> None:
    [remark] = answers["mistaken_tasks:UnusedParameters"]["remarks"]
    assert "2 parameters got no gradient" in remark and "spare.weight, spare.bias" in remark
    assert "kind" not in answers["mistaken_tasks:UnusedBlock"]


def test_reading_the_rank_is_remarked_once_and_allowed(answers: dict[str, Any]) -> None:
    [remark] = answers["mistaken_tasks:PrintsOnRankZero"]["remarks"]
    assert re.match(r"mistaken_tasks\.py:\d+ in loss\(\) reads get_rank\(\)", remark)


def test_an_optimizer_may_use_what_dtensors_do(answers: dict[str, Any]) -> None:
    assert "kind" not in answers["mistaken_tasks:FullTensors"]


def test_harmless_settings_are_undone_and_change_nothing(answers: dict[str, Any]) -> None:
    found, right = answers["mistaken_tasks:OwnSettings"], answers["mistaken_tasks:Right"]
    assert (found["loss"], found["last_loss"]) == (right["loss"], right["last_loss"])
    undone = [re.search(r"calls torch\.(\S+)\(\), which was undone", remark) for remark in found["remarks"]]
    assert [one and one[1] for one in undone] == [
        "set_num_threads",
        "autograd.set_detect_anomaly",
        "use_deterministic_algorithms",
    ]
