"""Programs on the command line become job specs; options of launchers are read or refused by name."""

from pathlib import Path
from typing import Any

import pytest

from shoal_api.cli.program import make_spec, parse_workers, read_program
from shoal_api.cli.session import CliError
from shoal_workers.contract.checks.spec_errors import parse_spec


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with two scripts; and one script elsewhere."""
    directory = tmp_path / "here"
    (directory / "sub").mkdir(parents=True)
    (tmp_path / "else").mkdir()
    for path in (directory / "train.py", directory / "sub" / "my train.py", tmp_path / "else" / "other.py"):
        path.write_text("print()\n")
    monkeypatch.chdir(directory)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "no-configuration"))
    return directory


def _spec(*words: str, module: str | None = None, max_workers: int | None = None) -> dict[str, Any]:
    program = read_program(words, module)
    assert program is not None
    document = make_spec(program, max_workers)
    assert parse_spec(document)
    return document


def _script(*words: str, **options: Any) -> dict[str, Any]:
    return dict(_spec(*words, **options)["script"])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train.py", "--lr", "3e-4"], {"file": "train.py", "args": ["--lr", "3e-4"], "launcher": "torchrun"}),
        (["python", "train.py", "-x"], {"file": "train.py", "args": ["-x"], "launcher": "python"}),
        (["/usr/bin/python3.11", "-u", "train.py"], {"file": "train.py", "args": [], "launcher": "python"}),
        (["python", "-m", "pkg.train", "a"], {"module": "pkg.train", "args": ["a"], "launcher": "python"}),
        (["torchrun", "train.py", "--x=1"], {"file": "train.py", "args": ["--x=1"], "launcher": "torchrun"}),
        (["torchrun", "-m", "pkg.train", "-m"], {"module": "pkg.train", "args": ["-m"], "launcher": "torchrun"}),
        (
            ["python", "-m", "torch.distributed.run", "--nproc-per-node=2", "train.py"],
            {"file": "train.py", "args": [], "launcher": "torchrun"},
        ),
        (["accelerate", "launch", "train.py", "1"], {"file": "train.py", "args": ["1"], "launcher": "accelerate"}),
    ],
)
def test_a_command_line_is_read_as_its_launcher_would_read_it(words: list[str], expected: dict[str, Any]) -> None:
    assert _script(*words) == expected


def test_a_module_is_run_with_all_words_as_its_arguments() -> None:
    spec = _spec("--lr", "1", module="package.train")
    assert spec["script"] == {"module": "package.train", "args": ["--lr", "1"], "launcher": "torchrun"}
    assert spec["name"] == "package.train"


@pytest.mark.parametrize(
    ("options", "workers"),
    [
        ([], None),
        (["--nproc-per-node", "2"], (2, 2)),
        (["--nproc_per_node=4", "--nnodes=2"], (8, 8)),
        (["--nnodes", "1:4", "--nproc-per-node", "2"], (2, 8)),
    ],
)
def test_the_numbers_of_torchrun_are_workers(options: list[str], workers: tuple[int, int] | None) -> None:
    elasticity = _spec("torchrun", *options, "train.py").get("elasticity")
    found = elasticity and (elasticity["min_workers"], elasticity["max_workers"])
    assert found == workers


def test_options_that_bring_processes_together_are_left_out_and_named() -> None:
    options = ["--standalone", "--rdzv-backend=c10d", "--master_port", "29500"]
    program = read_program(["torchrun", *options, "train.py", "--standalone"])
    assert program is not None
    assert program.not_needed == ("--standalone", "--rdzv-backend", "--master_port")
    assert program.args == ("--standalone",)


def test_options_of_accelerate_are_workers_and_variables() -> None:
    options = ["--num_processes", "3", "--mixed-precision=bf16", "--multi_gpu", "--num_machines", "1", "--cpu"]
    program = read_program(["accelerate", "launch", *options, "train.py"])
    assert program is not None
    spec = make_spec(program)
    assert spec["elasticity"] == {"min_workers": 3, "max_workers": 3}
    assert spec["code"]["env"] == {"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_USE_CPU": "true"}
    assert program.not_needed == ("--multi_gpu", "--num_machines")


def test_options_of_deepspeed_are_workers_and_its_launchers_variables() -> None:
    options = ["--num_nodes", "2", "--num_gpus=4", "--master_port", "29500", "--hostfile=hosts"]
    program = read_program(["deepspeed", *options, "train.py", "--deepspeed_config", "ds.json"])
    assert program is not None
    assert (program.workers, program.args) == ((8, 8), ("--deepspeed_config", "ds.json"))
    assert make_spec(program)["script"]["launcher"] == "deepspeed_env"
    left_out = ("--master_port", "--hostfile", "the argument --local_rank (read LOCAL_RANK of the environment)")
    assert program.not_needed == left_out
    module = read_program(["deepspeed", "--no_local_rank", "--module", "pkg.train", "-x"])
    assert module is not None and (module.module, module.args, module.not_needed) == ("pkg.train", ("-x",), ())


_CONFIG = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
dynamo_config: {dynamo_backend: inductor, mode: default}
fsdp_config: {fsdp_version: 2, offload_params: false, fsdp_transformer_layer_cls_to_wrap: Block}
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 4
rdzv_backend: static
use_cpu: false
"""


def test_a_configuration_of_accelerate_is_read_and_the_command_line_comes_first(here: Path) -> None:
    (here / "config.yaml").write_text(_CONFIG)
    options = ["--config_file", "config.yaml", "--mixed_precision", "no"]
    program = read_program(["accelerate", "launch", *options, "train.py"])
    assert program is not None
    assert (program.workers, program.config_file) == ((4, 4), Path("config.yaml"))
    assert program.env == {
        "ACCELERATE_MIXED_PRECISION": "no",
        "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR",
        "ACCELERATE_DYNAMO_MODE": "default",
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_OFFLOAD_PARAMS": "false",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block",
    }
    assert program.not_needed == ("main_training_function", "num_machines", "rdzv_backend")


def test_the_default_configuration_of_accelerate_is_read_as_accelerate_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    default = tmp_path / "accelerate" / "default_config.yaml"
    default.parent.mkdir()
    default.write_text("num_processes: 3\nmixed_precision: fp16\ndistributed_type: 'NO'\n")
    program = read_program(["accelerate", "launch", "train.py"])
    assert program is not None and program.config_file == default
    assert (program.workers, program.env) == ((3, 3), {"ACCELERATE_MIXED_PRECISION": "fp16"})
    with_cpu = read_program(["accelerate", "launch", "--cpu", "train.py"])
    assert with_cpu is not None and (with_cpu.workers, with_cpu.config_file) == (None, None)


@pytest.mark.parametrize(
    ("text", "error", "hint"),
    [
        ("distributed_type: DEEPSPEED", "distributed_type DEEPSPEED", "DeepSpeedPlugin"),
        ("compute_environment: AMAZON_SAGEMAKER", "AMAZON_SAGEMAKER", "LOCAL_MACHINE"),
        ("fp8_config: {backend: TE}", "does not support fp8_config", "--set code.env"),
        ("[1, 2", "not a YAML file", "accelerate config"),
        ("- 1", "not a YAML file", "accelerate config"),
    ],
)
def test_a_configuration_that_shoal_cannot_start_is_refused_by_its_key(
    here: Path, text: str, error: str, hint: str
) -> None:
    (here / "config.yaml").write_text(text)
    with pytest.raises(CliError) as refused:
        read_program(["accelerate", "launch", "--config_file", "config.yaml", "train.py"])
    assert error in refused.value.message and hint in refused.value.hint


@pytest.mark.parametrize(
    ("words", "error", "hint"),
    [
        (["torchrun", "--max-restarts", "3", "train.py"], "--max-restarts", "retry.max_failures"),
        (["torchrun", "--what=1", "train.py"], "--what", "shoal submit train.py"),
        (["torchrun", "--nproc-per-node", "gpu", "train.py"], "'gpu'", "--workers"),
        (["torchrun", "--nnodes", "4:2", "train.py"], "'4:2'", "2:8"),
        (["torchrun"], "needs a script", "shoal submit"),
        (["torchrun", "-m"], "needs a module", "shoal submit"),
        (["accelerate", "launch", "--config_file", "a.yaml", "train.py"], "a.yaml: No such file", "accelerate config"),
        (["deepspeed", "--include", "a:0", "train.py"], "--include", "worker.gpus"),
        (["deepspeed", "--num_nodes", "2", "train.py"], "--num_nodes", "--workers"),
        (["mpirun", "-n", "2", "train.py"], "mpirun", "shoal submit train.py"),
        (["bash", "run.sh"], "a Python program", "shoal submit train.py"),
        (["ray", "job", "submit"], "shoal submit", "shoal submit train.py"),
        (["FOO=1", "python", "train.py"], "FOO=1", "--set code.env.FOO=VALUE"),
        (["python", "-c", "pass"], "-c", "shoal submit train.py"),
        (["job.yaml", "--lr", "1"], "cannot take the argument", "script.args"),
        (["nowhere.py"], "nowhere.py is not there", "path"),
        (["sub.py"], "not there", "path"),
        ([], "needs a spec or a script", "shoal submit train.py"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_way_out(words: list[str], error: str, hint: str) -> None:
    with pytest.raises(CliError) as refused:
        read_program(words)
    assert error in refused.value.message and hint in refused.value.hint


@pytest.mark.parametrize("words", [["job.yaml"], ["-"], ["examples/byte-lm.json"], ["ray"]])
def test_other_words_are_a_spec(words: list[str], here: Path) -> None:
    (here / "ray").touch()
    assert read_program(words) is None


def test_the_code_is_the_current_directory_if_the_script_is_in_it_else_that_of_the_script(here: Path) -> None:
    inside, outside = _spec("sub/my train.py"), _spec("../else/other.py")
    assert (inside["script"]["file"], inside["code"]["working_dir"]) == ("sub/my train.py", str(here))
    assert inside["name"] == "my-train"
    elsewhere = str(here.parent / "else")
    assert (outside["script"]["file"], outside["code"]["working_dir"]) == ("other.py", elsewhere)
    assert _spec("-x", module="train")["code"] == {"working_dir": str(here)}


def test_a_name_that_no_job_may_have_is_replaced(here: Path) -> None:
    (here / "日本.py").touch()
    assert _spec("日本.py")["name"] == "script"


def test_a_plain_python_program_finds_its_peers_if_there_are_several() -> None:
    assert _script("python", "train.py", max_workers=1)["launcher"] == "python"
    assert _script("python", "train.py", max_workers=4)["launcher"] == "torchrun"


@pytest.mark.parametrize(("text", "workers"), [("4", (4, 4)), ("2:8", (2, 8)), ("1:1", (1, 1))])
def test_workers_are_a_number_or_a_range(text: str, workers: tuple[int, int]) -> None:
    assert parse_workers("--workers", text) == workers


@pytest.mark.parametrize("text", ["", "0", "8:2", "a", "2:", ":2", "1:2:3", "-1", "²"])
def test_other_numbers_of_workers_are_refused(text: str) -> None:
    with pytest.raises(CliError, match="not a number of workers, nor a range"):
        parse_workers("--workers", text)
