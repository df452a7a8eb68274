"""What `shoal check` says of a script: which door it can use, what a lost worker costs, what stands in the way."""

import textwrap
from pathlib import Path

import pytest

from shoal_api.cli.program_findings import (
    LOOP_COST,
    Findings,
    RayTrain,
    Remark,
    describe,
    examine,
    read_ray_train,
    refuse_function_as_task,
)
from shoal_api.cli.session import CliError
from shoal_api.cli.trial import with_workers

DDP = """\
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
import shoal
dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(2, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
path = os.environ["SHOAL_CHECKPOINT_DIR"] + "/last.pt"
state = torch.load(path)
model(torch.ones(2)).sum().backward()
torch.save(state, path)
shoal.log(step=1)
"""


def _examined(tmp_path: Path, text: str, **modules: str) -> Findings:
    for name, source in {"train": text, **modules}.items():
        path = tmp_path / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))
    return examine(tmp_path / "train.py", tmp_path)


def _places(remarks: tuple[Remark, ...], words: str) -> tuple[str, ...]:
    [found] = [one for one in remarks if words in one.words]
    return found.places


def test_a_script_that_has_everything_can_run_as_it_is(tmp_path: Path) -> None:
    found = _examined(tmp_path, DDP)
    assert (found.obstacles, found.notes, found.before_task) == ((), (), ())
    assert (found.launcher, found.document()["door"]) == ("torchrun", "script")
    assert _places(found.distributed, "init_process_group") == ("train.py:6",)
    assert _places(found.distributed, "DistributedDataParallel") == ("train.py:7",)
    assert found.cost == Remark("the steps since its last checkpoint, which it loads when it starts", ("train.py:10",))
    text = describe(found)
    assert text.startswith("train.py can run as a script, as it is: shoal submit train.py --workers 1:4\n")
    assert "no obstacle was found" in text


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("dist.init_process_group('gloo', init_method='tcp://10.0.0.1:1')", "init_method 'tcp://10.0.0.1:1'"),
        ("dist.init_process_group('gloo', rank=0, world_size=4)", "rank and world_size"),
        ("torch.multiprocessing.spawn(print)", "starts processes, but Shoal already starts one"),
        ("from ray.train.xgboost import XGBoostTrainer; XGBoostTrainer(print)", "starts Ray workers"),
        ("from ray import tune; tune.Tuner(print)", "shoal sweep"),
        ("os.environ['MASTER_PORT'] = '29500'", "os.environ.setdefault"),
        ("model.to('cuda:0')", "LOCAL_RANK"),
        ("model.cuda(0)", "LOCAL_RANK"),
        ("torch.cuda.set_device(0)", "LOCAL_RANK"),
        ("torch.device('cuda', 0)", "LOCAL_RANK"),
        ("input('continue?')", "no terminal"),
        ("dist.init_process_group('gloo', init_method=f'tcp://{host}:1')", "init_method 'tcp://'"),
        ("os.environ.update(MASTER_ADDR='10.0.0.1')", "os.environ.setdefault"),
        ("os.environ.update({'MASTER_ADDR': '10.0.0.1'})", "os.environ.setdefault"),
        ("os.environ |= {'MASTER_ADDR': 'x'}", "os.environ.setdefault"),
        ("os.environ.update(dict(MASTER_PORT='1'))", "os.environ.setdefault"),
        ("env = os.environ; env['MASTER_PORT'] = '1'", "os.environ.setdefault"),
        ("dist.init_process_group('gloo', 'tcp://10.0.0.1:1')", "init_method 'tcp://10.0.0.1:1'"),
        ("u = 'tcp://%s:1' % host; dist.init_process_group('gloo', init_method=u)", "init_method 'tcp://"),
        ("dist.init_process_group('gloo', 'tcp://{}:1'.format(host))", "init_method 'tcp://"),
        ("breakpoint()", "no terminal"),
    ],
)
def test_what_stands_in_the_way_of_the_script_is_named_with_its_line(line: str, words: str, tmp_path: Path) -> None:
    found = _examined(tmp_path, f"{DDP}{line}\n")
    assert _places(found.obstacles, words) == ("train.py:14",)
    assert found.document()["door"] is None
    assert "after a change" in describe(found)


@pytest.mark.parametrize(
    "line",
    [
        "dist.init_process_group('gloo', init_method='env://', rank=rank, world_size=size)",
        "os.environ.setdefault('MASTER_PORT', '29500')",
        "model.cuda(local_rank)",
        "model.cuda(False)",
        "os.environ['OMP_NUM_THREADS'] = '1'",
        "if rank == 0: model.module(torch.ones(2))",
        "if rank == 0: pass\nelse: dist.barrier()",
        "if rank == 1: dist.barrier()",
        "if rank != 0: pass\ndist.barrier()",
        "def save():\n    if rank != 0:\n        return\n    print()\ndist.barrier()",
        "if rank == 0: dist.broadcast(x, 0)\nelse: dist.broadcast(y, 0)",
        "if local_rank not in [-1, 0]: dist.barrier()\nread()\nif local_rank == 0: dist.barrier()",
        "if rank == 0 or x: dist.barrier()",
        "if rank < 2: dist.barrier()",
        "def test(model): model(x)\nif rank == 0: test(model.module)",
        "def save(net): torch.save(net.state_dict(), path)\nif rank == 0: save(model)",
        "if rank == 0: dist.send(x, 1)\nelse: dist.recv(x, 0)",
    ],
)
def test_what_leaves_the_place_to_the_environment_is_in_nobodys_way(line: str, tmp_path: Path) -> None:
    assert _examined(tmp_path, f"{DDP}{line}\n").obstacles == ()


@pytest.mark.parametrize(
    ("line", "words", "places"),
    [
        ("torch.optim.AdamW([])", "2 optimizers", ("train.py:8", "train.py:14")),
        ("from torch.optim import Adam; Adam([])", "2 optimizers", ("train.py:8", "train.py:14")),
        ("other.backward()", "several backward passes", ("train.py:11", "train.py:14")),
        ("torch.autograd.grad(1, 2)", "calls autograd itself", ("train.py:14",)),
        ("loss.backward(retain_graph=True)", "calls autograd itself", ("train.py:14",)),
        ("class Stream(torch.utils.data.IterableDataset): pass", "IterableDataset", ("train.py:14",)),
        ("dist.all_gather([], 1)", "calls collectives", ("train.py:14",)),
        ("from torch.distributed.nn.functional import all_gather; all_gather(1)", "collectives", ("train.py:14",)),
        ("dist.reduce_scatter_tensor(a, b)", "collectives", ("train.py:14",)),
        ("import torch.distributed._functional_collectives as c; c.all_reduce(x)", "collectives", ("train.py:14",)),
        ("accelerator.gather_for_metrics(x)", "collectives", ("train.py:14",)),
        ("dist.recv(x, 0)", "collectives", ("train.py:14",)),
        ("import stable_baselines3 as sb3; sb3.PPO('MlpPolicy', env)", "the model makes samples", ("train.py:14",)),
        ("torch.multinomial(p, 1)", "the model makes samples", ("train.py:14",)),
        ("actor.generate(prompts)", "the model makes samples", ("train.py:14",)),
        ("import gymnasium\nclass Pole(gymnasium.Env): ...", "the model makes samples", ("train.py:15",)),
        ("from trl.experimental.ppo import PPOTrainer; PPOTrainer()", "a trainer runs the loop", ("train.py:14",)),
        ("from lightning.pytorch import Trainer; Trainer()", "a trainer runs the loop", ("train.py:14",)),
        ("from transformers import Trainer\nclass A(Trainer): ...\nA(m)", "a trainer runs the loop", ("train.py:16",)),
        ("import gymnasium as gym; gym.make('CartPole-v1')", "the model makes samples", ("train.py:14",)),
        ("torch.distributions.Categorical(logits=x).sample()", "the model makes samples", ("train.py:14",)),
        ("from transformers import Trainer; Trainer(model)", "a trainer runs the loop", ("train.py:14",)),
    ],
)
def test_what_stands_in_the_way_of_a_task_is_named_with_its_lines(
    line: str, words: str, places: tuple[str, ...], tmp_path: Path
) -> None:
    found = _examined(tmp_path, f"{DDP}{line}\n")
    assert found.obstacles == ()
    assert _places(found.before_task, words) == places


_ACCELERATE = "import os, torch\nfrom accelerate import Accelerator\nAccelerator()\n"


@pytest.mark.parametrize(
    ("source", "is_said"),
    [
        (f"{_ACCELERATE}torch.utils.data.DataLoader(x, 8)", True),
        (f"{_ACCELERATE}torch.utils.data.DataLoader(x, 8 // int(os.environ['WORLD_SIZE']))", False),
        ("from transformers import Trainer\nTrainer().train()", True),
        ("from mine import Mine\nMine().train()", True),
        (f"{_ACCELERATE}torch.utils.data.DataLoader(x, 8 // accelerator.num_processes)", False),
        (f"{_ACCELERATE}torch.utils.data.DataLoader(x, 8 // fabric.world_size)", False),
        (f"{_ACCELERATE}Accelerator(split_batches=True)\ntorch.utils.data.DataLoader(x, 8)", False),
        ("import lightning as L\nL.Trainer(devices=2)", False),
        ("from ray.train.torch import TorchTrainer\nTorchTrainer(f)\ndata.iter_torch_batches(batch_size=8)", True),
        (
            "import ray.train\nfrom ray.train.torch import TorchTrainer\nTorchTrainer(f)\n"
            "data.iter_torch_batches(batch_size=8 // ray.train.get_context().get_world_size())",
            False,
        ),
    ],
)
def test_the_batch_size_is_spoken_of_where_the_program_does_not_know_how_many_it_is(
    source: str, is_said: bool, tmp_path: Path
) -> None:
    notes = _examined(tmp_path, source, mine="import transformers\nclass Mine(transformers.Trainer): ...\n").notes
    assert any("divide by WORLD_SIZE" in one.words for one in notes) is is_said


def test_one_sentence_says_what_a_loop_loses() -> None:
    docs = Path(__file__).parents[4] / "docs"
    assert [page for page in ("loops.md", "porting.md") if LOOP_COST not in (docs / page).read_text("utf-8")] == []


@pytest.mark.parametrize(
    ("most_workers", "least", "most", "is_proposal", "workers"),
    [
        (3, 1, 4, True, "1:3"),
        (1, 1, 4, True, "1"),
        (None, 1, 4, True, "1:4"),
        (8, 2, 4, False, "2:4"),
        (4, 4, 4, False, "4"),
        (3, 1, 4, False, None),
        (3, 4, 4, True, None),
    ],
)
def test_a_loop_is_proposed_for_the_workers_for_which_it_has_work(
    most_workers: int | None, least: int, most: int, is_proposal: bool, workers: str | None
) -> None:
    trial, elasticity = {"most_workers": most_workers}, {"min_workers": least, "max_workers": most}
    if workers is None:
        with pytest.raises(CliError, match=f"train.py has work for {most_workers} workers only, .* is {most}"):
            with_workers(trial, "train.py", elasticity, is_proposal=is_proposal)
    else:
        assert with_workers(trial, "train.py", elasticity, is_proposal=is_proposal)["workers"] == workers


@pytest.mark.parametrize(
    ("arguments", "workers"),
    [
        ("devices=1", "1"),
        ("devices='1', strategy='ddp'", "1"),
        ("devices=[0]", "1"),
        ("accelerator='cpu'", "1"),
        ("accelerator='cpu', devices='auto'", "1"),
        ("devices=1, num_nodes=2", "2"),
        ("accelerator='cpu', devices=2", "2"),
        ("devices=[0, 1], num_nodes=2", "4"),
        ("devices=n", "1:4"),
        ("devices=1, num_nodes=n", "1:4"),
        ("", "1:4"),
    ],
)
def test_lightning_gets_the_workers_for_which_it_is_made(arguments: str, workers: str, tmp_path: Path) -> None:
    for call in (
        "import lightning\nlightning.Trainer",
        "import lightning.pytorch as pl\npl.Trainer",
        "from pytorch_lightning import Trainer\nTrainer",
        "import lightning\nlightning.Fabric",
    ):
        found = _examined(tmp_path, f"{call}({arguments})")
        assert f"--workers {workers}\n" in describe(found), call
        assert (bool(found.distributed), found.launcher == "python") == (workers != "1", workers == "1"), call


def test_schedulers_and_averaged_models_are_no_optimizers(tmp_path: Path) -> None:
    more = "torch.optim.lr_scheduler.StepLR(optimizer, 1)\ntorch.optim.swa_utils.AveragedModel(model)\n"
    assert not [one for one in _examined(tmp_path, DDP + more).before_task if "optimizers" in one.words]


@pytest.mark.parametrize(
    ("source", "cost"),
    [
        ("print()", "all steps so far: no line was found that saves or loads"),
        ("import torch\ntorch.save(1, 'a.pt')", "all steps so far: it saves"),
        ("from ray.train import report\nreport({'loss': 1})", "all steps so far: no line"),
        ("from ray.train import report\nreport({'loss': 1}, checkpoint=None)", "all steps so far: no line"),
        ("from ray.train import report\nreport({'loss': 1}, checkpoint=c)", "all steps so far: it saves"),
        ("from ray.train import report\nreport({'loss': 1}, c)", "all steps so far: it saves"),
        ("from transformers import Trainer\nTrainer().train()", "all steps so far: the trainer is not asked to resume"),
        ("from transformers import Trainer\nTrainer().train(resume_from_checkpoint=True)", "the steps since"),
        ("import lightning as L\nL.Trainer().fit(1, ckpt_path='last')", "the steps since"),
        ("from torch.distributed import checkpoint as dcp\ndcp.load({}, checkpoint_id='x')", "the steps since"),
    ],
)
def test_what_a_lost_worker_costs_follows_from_the_scripts_checkpoints(source: str, cost: str, tmp_path: Path) -> None:
    assert _examined(tmp_path, source).cost.words.startswith(cost)


def test_what_a_script_does_not_have_is_noted(tmp_path: Path) -> None:
    found = _examined(tmp_path, "import signal, torch\ntorch.save(1, 'a.pt')\nsignal.signal(signal.SIGTERM, print)\n")
    assert found.launcher == "python"
    assert _places(found.notes, "no distributed training was found") == ()
    assert _places(found.notes, "SHOAL_CHECKPOINT_DIR") == ("train.py:2",)
    assert _places(found.notes, "shoal.log(step=step, loss=loss)") == ()
    assert _places(found.notes, "--grace SECONDS") == ("train.py:3",)
    assert "shoal submit train.py --workers 1\n" in describe(found)


def test_accelerate_names_its_launcher(tmp_path: Path) -> None:
    found = _examined(tmp_path, "from accelerate import Accelerator\nAccelerator()\n")
    assert "shoal submit train.py --workers 1:4 --launcher accelerate" in describe(found)


def test_the_modules_of_the_program_are_read_too_and_nothing_is_run(tmp_path: Path) -> None:
    found = _examined(
        tmp_path,
        "import net\nfrom pkg import sub\nfrom pkg.inner import wrap\nraise SystemExit(3)\n",
        net="from torch.nn.parallel import DistributedDataParallel\n\nDistributedDataParallel(1)\n",
        pkg____init__="",
        pkg__sub="from . import deep\n",
        pkg__deep="import torch.distributed\ntorch.distributed.init_process_group()\n",
        pkg__inner="this is no Python\n",
    )
    assert _places(found.distributed, "DistributedDataParallel") == ("net.py:3",)
    assert _places(found.distributed, "init_process_group") == ("pkg/deep.py:2",)


def test_a_script_that_is_not_python_is_refused_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(CliError, match=r"train\.py:2 is not valid Python"):
        _examined(tmp_path, "x = 1\nif:\n")


def test_a_function_as_the_task_is_refused_with_the_door_for_scripts(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("class Task: ...\n\ndef main(): ...\n")
    code = {"working_dir": str(tmp_path)}
    with pytest.raises(CliError, match=r"main \(train\.py:3\) is a function") as refused:
        refuse_function_as_task({"task": "train:main", "code": code})
    assert "shoal submit train.py" in refused.value.hint
    for task in ("train:Task", "train:other", "nowhere:main"):
        refuse_function_as_task({"task": task, "code": code})
    refuse_function_as_task({"script": {"file": "train.py"}})


RAY_TRAIN = """\
import ray.train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

def train(config):
    checkpoint = ray.train.get_checkpoint()
    ray.train.report({"loss": 1.0})

TorchTrainer(
    train,
    scaling_config=ScalingConfig(num_workers=4, use_gpu=True),
    run_config=RunConfig(failure_config=FailureConfig(max_failures=3)),
).fit()
"""


def test_a_script_of_ray_train_can_run_as_it_is(tmp_path: Path) -> None:
    found = _examined(tmp_path, RAY_TRAIN)
    assert (found.launcher, found.obstacles, found.notes) == ("ray_train", (), ())
    assert found.cost == Remark("the steps since its last checkpoint, which it loads when it starts", ("train.py:6",))
    assert "train.py can run as a script, as it is: shoal submit train.py --workers 1:4\n" in describe(found)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("", "", RayTrain((4, 4), 1, None, 3)),
        ("num_workers=4", "num_workers=(2, 8)", RayTrain((2, 8), 1, None, 3)),
        ("num_workers=4", "num_workers=int(sys.argv[1])", RayTrain(None, 1, None, 3)),
        ("use_gpu=True", "use_gpu=False", RayTrain((4, 4), 0, None, 3)),
        (", use_gpu=True", "", RayTrain((4, 4), None, None, 3)),
        ("use_gpu=True", "resources_per_worker={'CPU': 2}", RayTrain((4, 4), None, 2.0, 3)),
        ("max_failures=3", "max_failures=-1", RayTrain((4, 4), 1, None, 10_000)),
        ("def train", "ScalingConfig(num_workers=2)\ndef train", RayTrain(None, None, None, 3)),
        ("TorchTrainer(\n", "print(\n", None),
    ],
)
def test_what_a_trainer_says_of_its_workers_is_read(
    before: str, after: str, expected: RayTrain | None, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(RAY_TRAIN.replace(before, after, 1) if before else RAY_TRAIN)
    assert read_ray_train(tmp_path / "train.py", tmp_path) == expected
