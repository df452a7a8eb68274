"""The doctor, Ctrl-C while the command line is loaded, a follower without its server, and options that act."""

import ast
import inspect
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal_api.cli import commands
from shoal_api.cli.commands.doctor import (
    GIB,
    Finding,
    Verdict,
    examine,
    find_worst,
    judge_library,
    judge_python,
    judge_ray_auth,
    judge_space,
    list_checks,
)
from shoal_api.cli.follow import describe_meanwhile
from shoal_api.cli.main import COMMANDS, load_function
from shoal_api.cli.session import Output
from shoal_service.views import JobStatus, JobView
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.job import JobState


def test_an_old_python_fails_and_one_that_was_not_tried_warns() -> None:
    assert judge_python((3, 10), "3.10.1").verdict is Verdict.FAIL
    assert judge_python((3, 13), "3.13.0").verdict is Verdict.OK
    assert judge_python((3, 14), "3.14.0").verdict is Verdict.WARN


def test_free_space_is_compared_with_two_limits() -> None:
    def judged(gib: float) -> Verdict:
        free = int(gib * GIB)
        return judge_space("disk", "there", free, fail_below_gib=1, warn_below_gib=4, hint="make room").verdict

    assert [judged(gib) for gib in (0.5, 2, 8)] == [Verdict.FAIL, Verdict.WARN, Verdict.OK]


def test_a_library_of_another_version_fails_even_if_its_number_begins_equally() -> None:
    assert judge_library("torch", "2.13.0+cpu", "").verdict is Verdict.OK
    assert judge_library("torch", "2.130.0", "").verdict is Verdict.FAIL
    assert judge_library("ray", None, "no module").verdict is Verdict.FAIL


def test_token_mode_without_a_token_fails() -> None:
    assert judge_ray_auth("token", None).verdict is Verdict.FAIL
    assert judge_ray_auth("token", "RAY_AUTH_TOKEN").verdict is Verdict.OK
    assert judge_ray_auth(None, None).verdict is Verdict.OK


def test_the_worst_verdict_counts() -> None:
    findings = [Finding(check="a", verdict=verdict, message="") for verdict in (Verdict.WARN, Verdict.OK)]
    assert find_worst(findings) is Verdict.WARN
    assert find_worst([]) is Verdict.OK


def test_each_check_is_named_before_it_begins(capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []

    def check() -> Finding:
        said.append(capsys.readouterr().err)
        return Finding(check="slow", verdict=Verdict.OK, message="done")

    names = [name for name, _ in list_checks("http://127.0.0.1:1", None)]
    found = list(examine(Output(as_json=True), ((name, check) for name in names)))
    assert said == [f"checking {name} ...\n" for name in names] and len(found) == len(names)
    assert capsys.readouterr().out == "", "standard output holds the result only"


INTERRUPTED = f"""
import os, signal, sys

INTERRUPTED_AT = sys.argv[1]

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == INTERRUPTED_AT:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), {signal.SIGINT:d})
        return None

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupts())
from shoal_api.cli.entry import main
sys.argv = ["shoal", "version"]
main()
"""


@pytest.mark.parametrize("module", ["typer", "shoal_api.cli.main", "shoal_api.cli.commands.doctor"])
def test_an_interrupt_while_the_command_line_is_loaded_is_no_traceback(module: str) -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, module], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_the_entry_runs_the_command_line_and_gives_ctrl_c_back_its_meaning() -> None:
    look = "\nimport signal; sys.exit(signal.getsignal(signal.SIGINT) is not signal.default_int_handler)"
    program = INTERRUPTED.replace("main()\n", "try:\n    main()\nexcept SystemExit:\n    pass\n") + look
    done = subprocess.run([sys.executable, "-c", program, "-"], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.startswith("shoal "), done.stderr


def job(state: JobState, reason: str = "") -> JobView:
    spec = parse_spec({"data": {"corpus": "python-stdlib"}, "stop": {"steps": 30}})
    status = JobStatus(state=state, reason=reason)
    return JobView(id="j", name="n", spec=spec, spec_version=1, etag="e", created_at=0.0, updated_at=0.0, status=status)


def test_a_job_that_trains_continues_with_its_cluster_not_without_any() -> None:
    assert describe_meanwhile(job(JobState.RUNNING)) == "the job continues as long as its Ray cluster runs"
    assert describe_meanwhile(None) == "the job continues as long as its Ray cluster runs"


def test_a_server_that_has_stopped_in_order_is_said_to_have_saved_the_job() -> None:
    for state in (JobState.PAUSING, JobState.QUEUED):
        assert "the next server continues the job from its last step" in describe_meanwhile(
            job(state, "server_stopped")
        )


def test_a_job_that_does_not_train_does_not_continue() -> None:
    assert describe_meanwhile(job(JobState.QUEUED, "capacity")) == "the job is QUEUED"


def unread(function: Callable[..., Any]) -> list[str]:
    """Parameters that the function never reads. The decorator of commands reads --url and --json."""
    function = inspect.unwrap(function)
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    read = {one.id for one in ast.walk(tree) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)}
    return [name for name in inspect.signature(function).parameters if name not in (*read, "session")]


def test_every_option_of_every_command_is_read() -> None:
    ignored = {name: unread(load_function(name)) for name in COMMANDS}
    assert {name: options for name, options in ignored.items() if options} == {}
    assert len(COMMANDS) > 75


def test_a_parameter_that_is_not_read_is_seen() -> None:
    def command(job: str, project: str) -> str:
        return job

    assert unread(command) == ["project"]


def names_read(node: ast.AST) -> frozenset[str]:
    return frozenset(one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load))


def follow(statements: list[ast.stmt], read: set[frozenset[str]]) -> tuple[set[frozenset[str]], set[frozenset[str]]]:
    """Follow each path through statements that begins with the names in `read`: the names that were read at the end of
    those that go on, and of those that return. A path that raises has refused its options."""
    returned: set[frozenset[str]] = set()
    for statement in statements:
        match statement:
            case ast.If():
                read = {names | names_read(statement.test) for names in read}
                branches = [follow(body, read) for body in (statement.body, statement.orelse)]
                read, ended = (set().union(*sides) for sides in zip(*branches, strict=True))
                returned |= ended
            case ast.Return():
                return set(), returned | {names | names_read(statement) for names in read}
            case ast.Raise():
                return set(), returned
            case _:
                read = {names | names_read(statement) for names in read}
    return read, returned


def ignored_on_a_path(function: Callable[..., Any]) -> set[str]:
    """Parameters that some path to the end of the function does not read."""
    function = inspect.unwrap(function)
    [definition] = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(definition, ast.FunctionDef)
    went_on, returned = follow(definition.body, {frozenset()})
    names = inspect.signature(function).parameters.keys() - {"session"}
    return {name for name in names if any(name not in read for read in went_on | returned)}


_NOTHING_TO_DO = {
    "top": {"every"},  # one view has no time to the next
    "label": {"yes"},  # a job that is named is changed without a question
    "init": {"directory"},  # it comes after a template
    "check": {"arguments", "timeout"},  # a program that is read, or a task, which takes as long as it takes
}


def test_no_way_through_a_command_ignores_an_option() -> None:
    ignored = {name: ignored_on_a_path(load_function(name)) for name in COMMANDS}
    assert {name: options for name, options in ignored.items() if options} == _NOTHING_TO_DO


def test_a_parameter_that_one_way_does_not_read_is_seen() -> None:
    def command(verb: str, project: str, seed: int) -> str:
        if verb == "show":
            if seed:
                raise ValueError(seed)
            return project
        return f"{verb} {seed}"

    assert ignored_on_a_path(command) == {"project"}


def test_every_command_has_a_line_in_the_table() -> None:
    folder = Path(commands.__file__).parent
    decorated = {
        f"{module.stem}.{node.name}"
        for module in folder.glob("*.py")
        for node in ast.parse(module.read_bytes()).body
        if isinstance(node, ast.FunctionDef)
        and any(ast.unparse(decorator).startswith(("command(", "_for_each_job(")) for decorator in node.decorator_list)
    }
    assert decorated == set(COMMANDS.values())
