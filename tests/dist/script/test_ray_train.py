"""Scripts of Ray Train in real processes, without a Ray cluster: who runs what, reports, checkpoints, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kit.processes.script_bench import Events, ScriptBench
from shoal_workers.contract.messages import ExitKind
from shoal_workers.contract.worker_reports import StepReport
from shoal_workers.ray_internals import names_of_answers
from shoal_workers.ray_train.fit import Answers

Bench = Callable[..., ScriptBench]
RAY_TRAIN = {"launcher": "ray_train"}
EXAMPLE = Path(__file__).parents[3] / "examples" / "ray-train" / "train.py"
_HEAD = """
import os, signal, sys, tempfile
from pathlib import Path
import events
import torch
import torch.distributed as dist
import ray.train, ray.train.collective
from ray.train import Checkpoint, CheckpointConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
"""
_TRAINS = (
    _HEAD
    + """
def train(config):
    rank = ray.train.get_context().get_world_rank()
    torch.manual_seed(0)
    model = ray.train.torch.prepare_model(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    done, checkpoint = 0, ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            files = sorted(os.listdir(folder))
            state = torch.load(f"{folder}/state.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["step"]
        events.say(rank=rank, resumed=done, files=files, name=Path(checkpoint.path).name.split("-")[0])
    for step in range(done + 1, config["steps"] + 1):
        batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))[rank::2]
        loss = torch.nn.functional.mse_loss(model(batch), batch.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 1 and step == config["dies_before"] and not done:
            # Rank 0 has copied its part of the checkpoint by then, or will.
            events.say(killed=True)
            os.kill(os.getpid(), signal.SIGKILL)
        with tempfile.TemporaryDirectory() as folder:
            if rank == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state, f"{folder}/state.pt")
            else:
                Path(folder, "of_rank_1").write_text(str(step))
            ray.train.report({"loss": loss.item(), "step": step}, checkpoint=Checkpoint.from_directory(folder))
    return rank

result = TorchTrainer(
    train,
    train_loop_config={"steps": 6, "dies_before": int(sys.argv[1])},
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(name=f"run-{os.urandom(4).hex()}", checkpoint_config=CheckpointConfig(num_to_keep=2)),
).fit()
events.say(
    value=result.return_value, metrics=result.metrics, error=result.error, path=result.path,
    best=[Path(one.path).name for one, _ in result.best_checkpoints],
read=len(ray.train.Result.from_path(result.path).best_checkpoints), )
"""
)


def test_the_script_runs_on_rank_0_and_the_training_function_on_every_rank(bench: Bench, events: Events) -> None:
    text = (
        _HEAD
        + """
events.say(runs=os.environ["RANK"])

def train():
    context, value = ray.train.get_context(), ray.train.collective.broadcast_from_rank_zero(os.environ["RANK"])
    ray.train.collective.barrier()
    events.say(
        rank=context.get_world_rank(), size=context.get_world_size(), local=context.get_local_rank(),
        of_node=context.get_local_world_size(), node=context.get_node_rank(), name=context.get_experiment_name(),
        value=value, device=str(ray.train.torch.get_device()), group=dist.get_world_size(),
        checkpoint=ray.train.get_checkpoint(), shown=len(ray.train.get_all_reported_checkpoints()),
    )

trainer = TorchTrainer(train, run_config=RunConfig(name="mine"))
first, second = trainer.fit(), trainer.fit()
events.say(after=os.environ["RANK"], metrics=first.metrics, checkpoint=second.checkpoint)
"""
    )
    runners = bench(text, 2, script=RAY_TRAIN)
    runners.prepare()
    assert [end.kind for end in runners.run()] == [ExitKind.FINISHED] * 2
    assert events.next()["runs"] == "0"
    found = sorted((events.next() for _ in range(4)), key=lambda event: int(event["rank"]))
    for event in found:
        del event["pid"]
    same = {"size": 2, "of_node": 2, "node": 0, "name": "mine", "value": "0", "device": "cpu", "group": 2}
    of_ranks = [same | {"rank": rank, "local": rank, "checkpoint": None, "shown": 0} for rank in (0, 0, 1, 1)]
    assert found == of_ranks, "each fit() trains on both"
    last = events.next()
    assert (last["after"], last["metrics"], last["checkpoint"]) == ("0", None, None)


@pytest.mark.slow
def test_a_group_goes_on_from_the_newest_complete_checkpoint_as_if_nothing_had_happened(
    bench: Bench, events: Events
) -> None:
    runners = bench(_TRAINS, 2, script=RAY_TRAIN | {"args": ["4"]})
    runners.prepare()
    runners.start()
    events.next(killed=True)
    assert runners.exit_of(1).kind is ExitKind.SCRIPT_DIED
    runners.interrupt()
    losses = {one.step: one.loss for one in runners.reports(StepReport)}
    [run] = [path for path in runners.checkpoints.iterdir() if path.is_dir()]
    assert [one.kind for one in runners.run()] == [ExitKind.FINISHED] * 2
    found = [events.next(resumed=3) for _ in range(2)]
    assert {one["rank"] for one in found} == {0, 1}
    assert all(one["files"] == ["of_rank_1", "state.pt"] and one["name"] == "checkpoint_000002" for one in found)
    result = events.next(value=0)
    assert (result["error"], result["path"], result["read"]) == (None, str(run), 2), "a random name is still one run"
    assert result["best"] == ["checkpoint_000004-g2", "checkpoint_000005-g2"]
    left = sorted(path.name for path in run.iterdir() if path.is_dir())
    assert left == result["best"], "the unfinished checkpoint of the first group is gone"
    losses |= {one.step: one.loss for one in runners.reports(StepReport)}

    for path in run.rglob("*"):
        if path.is_file():
            path.unlink()  # the undisturbed run begins at the beginning
    runners = bench(_TRAINS, 2, script=RAY_TRAIN | {"args": ["0"]})
    runners.prepare()
    assert [one.kind for one in runners.run()] == [ExitKind.FINISHED] * 2
    assert events.next(value=0)["metrics"] == {"loss": losses[6], "step": 6}
    assert {one.step: one.loss for one in runners.reports(StepReport)} == losses


def test_only_numbers_are_logged_and_a_step_counts_reports(bench: Bench, events: Events) -> None:
    text = (
        _HEAD
        + """
def train():
    for epoch in range(2):
        ray.train.report({"loss": 2.0 - epoch, "learning": torch.tensor(0.5).numpy(), "name": "text", "flag": True})

TorchTrainer(train).fit()
"""
    )
    runners = bench(text, 2, script=RAY_TRAIN)
    runners.prepare()
    assert [end.kind for end in runners.run()] == [ExitKind.FINISHED] * 2
    found = [(one.step, one.loss, one.metrics) for one in runners.reports(StepReport)]
    assert found == [(1, 2.0, {"learning": 0.5}), (2, 1.0, {"learning": 0.5})]
    assert runners.said() == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("from ray.train.data_parallel_trainer import DataParallelTrainer as T\nT(print).fit()", "TorchTrainer"),
        ("TorchTrainer(train, scaling_config=ScalingConfig(use_gpu=True)).fit()", "--gpus 1 (worker.gpus)"),
        ("TorchTrainer(lambda: ray.train.get_dataset_shard('train')).fit()", "there is no dataset 'train'"),
        ("TorchTrainer(lambda one, two: None).fit()", "train_loop_per_worker takes no argument, or the config alone"),
        ("TorchTrainer(lambda: ray.train.get_context().get_storage()).fit()", "ray.train.get_checkpoint()"),
        (
            "TorchTrainer(lambda: ray.train.report({}, checkpoint=Checkpoint('/no/such'))).fit()",
            "the checkpoint /no/such is not there",
        ),
    ],
)
def test_what_shoal_does_not_answer_is_refused_in_words(text: str, words: str, bench: Bench) -> None:
    runners = bench(f"{_HEAD}\ndef train():\n    pass\n\n{text}\n", script=RAY_TRAIN)
    runners.prepare()
    [end] = runners.run()
    assert end.kind is ExitKind.USER_ERROR and end.error is not None
    assert words in end.error.message


@pytest.mark.parametrize("reporting", [0, 1])
def test_a_report_on_one_rank_alone_names_the_ranks(bench: Bench, reporting: int) -> None:
    text = f"""
def train():
    if ray.train.get_context().get_world_rank() == {reporting}:
        ray.train.report({{"loss": 1.0}})


TorchTrainer(train).fit()
"""
    runners = bench(_HEAD + text, 2, script=RAY_TRAIN)
    runners.prepare()
    runners.start()
    end = runners.exit_of(0)
    runners.runners[1].interrupt(runners.generation)  # as the supervisor does
    assert runners.exit_of(1).kind is ExitKind.INTERRUPTED
    assert end.kind is ExitKind.USER_ERROR and end.error is not None
    words = f"has returned on rank {1 - reporting}, and rank {reporting} is in ray.train.report()"
    assert words in end.error.message and "on every rank" in end.error.message


def test_what_the_job_decides_is_said(bench: Bench, capfd: pytest.CaptureFixture[str]) -> None:
    text = """
from ray.train import FailureConfig
run = RunConfig(failure_config=FailureConfig(max_failures=3))
TorchTrainer(lambda: None, scaling_config=ScalingConfig(num_workers=(4, 8)), run_config=run).fit()
"""
    runners = bench(_HEAD + text, script=RAY_TRAIN)
    runners.prepare()
    [end] = runners.run()
    assert end.kind is ExitKind.FINISHED
    said = capfd.readouterr().out
    assert "shoal: ScalingConfig(num_workers=(4, 8)) is not read here: the world size is 1" in said
    assert "shoal: FailureConfig(max_failures=3) is the job's retry.max_failures" in said


def test_the_storage_path_of_the_script_is_respected(bench: Bench, events: Events) -> None:
    text = (
        _HEAD
        + """
def train():
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "text").write_text("1")
        ray.train.report({"loss": 1.0}, checkpoint=Checkpoint.from_directory(folder))

result = TorchTrainer(train, run_config=RunConfig(name="mine", storage_path=sys.argv[1])).fit()
events.say(path=result.path)
"""
    )
    runners = bench(text, script=RAY_TRAIN)
    runners.close()
    storage = runners.folder / "storage"
    runners = bench(text, script=RAY_TRAIN | {"args": [str(storage)]})
    runners.prepare()
    assert runners.run()[0].kind is ExitKind.FINISHED
    assert events.next()["path"] == f"{storage}/mine"
    snapshot = json.loads((storage / "mine" / "checkpoint_manager_snapshot.json").read_text())
    assert [one["checkpoint_dir_name"] for one in snapshot["checkpoint_results"]] == ["checkpoint_000000-g1"]
    assert (storage / "mine" / "checkpoint_000000-g1" / "text").read_text() == "1"


def test_every_question_of_ray_train_has_an_answer() -> None:
    assert names_of_answers() <= set(dir(Answers))


def test_the_example_of_ray_train_runs(bench: Bench, events: Events) -> None:
    """As it stands in examples/, but for its dataset, which needs a Ray cluster: a list of batches."""
    text = EXAMPLE.read_text(encoding="utf-8")
    shard = '    shard = ray.train.get_dataset_shard("train")\n'
    reading = "shard.iter_torch_batches(batch_size=16)"
    datasets = (
        '        datasets={"train": ray.data.range(1280, override_num_blocks=2).map_batches(rings, batch_size=64)},\n'
    )
    printing = "    print("
    assert all(text.count(part) == 1 for part in (shard, reading, datasets, printing))
    text = text.replace(reading, "[{'point': torch.rand(8, 2), 'ring': torch.zeros(8).long()} for _ in range(10)]")
    text = text.replace(shard, "").replace(datasets, "")
    text = text.replace(printing, f"    import events\n    events.say(step=result.metrics['step'])\n{printing}")
    runners = bench(text, 2, script=RAY_TRAIN)
    runners.prepare()
    assert [one.kind for one in runners.run()] == [ExitKind.FINISHED] * 2
    assert events.next()["step"] == 30
    assert [one.step for one in runners.reports(StepReport)] == [10, 20, 30]
