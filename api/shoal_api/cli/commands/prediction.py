"""Commands that predict, and need no server: `plan` says memory and step time of a job, from what `profile` has
measured on this machine; `simulate` replays a job trace under the scheduler's policy in virtual time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
import yaml
from rich.progress import Progress as Bar

from shoal_api.cli.errors import CliError, ExitCode, reading
from shoal_api.cli.options import SetOption, SpecArgument, given
from shoal_api.cli.render.plan import render_hardware_profile, render_plan
from shoal_api.cli.render.simulation import Simulated, documents, render_simulation
from shoal_api.cli.session import Session, command
from shoal_api.cli.spec_file import load_spec
from shoal_service.control.planning import PlanRequest, answer, load_profiles, measure_profile, save_profile
from shoal_service.core.scheduling.decide import decide
from shoal_service.core.scheduling.market import Project
from shoal_service.settings import load_settings
from shoal_service.simulator.engine import Costs, Market, Progress
from shoal_service.simulator.engine import simulate as replay
from shoal_service.simulator.metrics import measure
from shoal_service.simulator.traces import Capacity, Trace, TraceError, parse_projects, read_capacity, read_trace

StateDirOption = Annotated[
    Path | None, typer.Option("--state-dir", help="Measured profiles are stored in its folder profiles/.")
]


@command(url=False)
def plan(
    session: Session,
    spec: SpecArgument,
    workers: Annotated[
        int | None,
        typer.Option("--workers", min=1, help="Number of workers. Default: elasticity.max_workers."),
    ] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", min=1, help="Number of workers with one GPU each.")] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu", help="Type of GPU: h100, h200, h800, b200, gb200, a100-80gb, a100-40gb, l40s, mi300x, or measured."
        ),
    ] = None,
    nodes: Annotated[
        str | None,
        typer.Option(
            "--nodes",
            metavar="4,4/4,4",
            help="Workers of each node, with / between racks. Default: nodes of the profile's size in one rack.",
        ),
    ] = None,
    compare: Annotated[
        str,
        typer.Option("--compare", metavar="'tp8 pp2'", help="Also predict the best layout with these degrees."),
    ] = "",
    top: Annotated[int, typer.Option("--top", min=1, max=100, help="Number of layouts to show.")] = 10,
    assignments: SetOption = None,
    state_dir: StateDirOption = None,
) -> None:
    """Predict memory and step time of every legal layout of a job, and say which one it would get and why.

    Nothing is trained. Exit code 1 if no layout fits into memory.
    """
    document = load_spec(spec, assignments or ())
    if workers is not None and gpus is not None:
        raise CliError("--workers cannot be combined with --gpus", hint=f"shoal plan {spec} --gpus {gpus}")
    if workers is None and gpus is None:
        workers = _max_workers(document)
    racks = _parse_racks(nodes) if nodes is not None else ()
    request = PlanRequest(spec=document, workers=workers, gpus=gpus, gpu=gpu, top=top, racks=racks, compare=compare)
    plan = answer(request, load_profiles(load_settings(**given(state_dir=state_dir)).state_dir))
    session.show(plan, render_plan)
    if plan.ranking.num_layouts and not plan.ranking.num_fitting:
        raise typer.Exit(ExitCode.FAILED)


@command(url=False)
def profile(
    session: Session,
    name: Annotated[
        str | None, typer.Option("--name", help="Name of the profile. Default: the GPU's name, or cpu.")
    ] = None,
    processes: Annotated[
        int, typer.Option("--processes", min=1, max=64, help="Size of the largest group that is measured.")
    ] = 8,
    seconds: Annotated[float, typer.Option("--seconds", min=0.05, help="Duration of each measurement.")] = 0.5,
    state_dir: StateDirOption = None,
) -> None:
    """Measure this machine for the planner: arithmetic, memory, communication. Run nothing else on it meanwhile."""
    measured = measure_profile(name=name, max_processes=processes, seconds=seconds, report=session.output.say)
    path = save_profile(load_settings(**given(state_dir=state_dir)).state_dir, measured)
    session.show(measured, lambda profile: render_hardware_profile(profile, str(path)))


def _parse_racks(nodes: str) -> tuple[tuple[int, ...], ...]:
    try:
        racks = tuple(tuple(int(size) for size in rack.split(",")) for rack in nodes.split("/"))
    except ValueError:
        racks = ((0,),)
    if any(size < 1 for rack in racks for size in rack):
        raise CliError(
            f"--nodes {nodes!r} is not a list of node sizes",
            hint="two racks, each with two nodes of 4: --nodes 4,4/4,4",
        )
    return racks


def _max_workers(document: dict[str, object]) -> int:
    elasticity = document.get("elasticity")
    number = elasticity.get("max_workers", 1) if isinstance(elasticity, dict) else 1
    return number if isinstance(number, int) and number >= 1 else 1


_NODES, _WORKERS_PER_NODE = 4, 4


@command(url=False)
def simulate(
    session: Session,
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="CSV file with one job a line; see simulation.md.")],
    nodes: Annotated[int | None, typer.Option("--nodes", min=1, help=f"Number of nodes. Default: {_NODES}.")] = None,
    workers_per_node: Annotated[
        int, typer.Option("--workers-per-node", min=1, help="Workers for which a node has room.")
    ] = _WORKERS_PER_NODE,
    capacity: Annotated[
        Path | None, typer.Option("--capacity", help="CSV file with the nodes over time, in place of --nodes.")
    ] = None,
    projects: Annotated[
        Path | None, typer.Option("--projects", help="YAML file with weights and quotas of projects.")
    ] = None,
    switch_s: Annotated[
        float, typer.Option("--switch-s", min=0, help="Seconds without training at each change of a job's workers.")
    ] = 0.3,
    start_s: Annotated[
        float, typer.Option("--start-s", min=0, help="Seconds from the first workers of a job to its first step.")
    ] = 4.3,
    restart_costs: Annotated[
        bool,
        typer.Option("--restart-costs", help="Both cost what the trace's column restart_s says, where it has a value."),
    ] = False,
    every_s: Annotated[
        float | None,
        typer.Option("--every-s", min=1, help="Also call the policy when this many seconds pass without an event."),
    ] = None,
) -> None:
    """Replay a job trace under the scheduler's policy, and show completion times.

    Virtual time: a day takes seconds, and nothing is trained. Exit code 1 if a job waits for ever.
    """
    market = Market(
        capacity=_capacity(capacity, nodes, workers_per_node),
        costs=Costs(switch_s=switch_s, start_s=start_s, use_restart_s=restart_costs),
        projects=_projects(projects),
        every_s=every_s,
    )
    jobs = _read_trace(trace)
    with _progress(session, len(jobs.jobs)) as progress:
        run = replay(jobs.jobs, decide, market, progress=progress)
    result = Simulated("shoal", run, measure(run, market))
    page = render_simulation(jobs, market, [result], restart_costs=restart_costs)
    session.show(documents(jobs, market, [result]), page)
    if result.metrics.num_unfinished:
        raise typer.Exit(ExitCode.FAILED)


def _capacity(path: Path | None, nodes: int | None, workers_per_node: int) -> Capacity:
    if path is None:
        return Capacity.constant(nodes or _NODES, workers_per_node)
    if nodes is not None:
        raise CliError("--nodes cannot be combined with --capacity", hint="the file has the number of nodes")
    with _reading_trace(path):
        return read_capacity(path, workers_per_node)


def _projects(path: Path | None) -> Mapping[str, Project]:
    if path is None:
        return {}
    with _reading_trace(path):
        try:
            document = yaml.safe_load(path.read_text(encoding="utf-8"))
        except yaml.YAMLError as error:
            raise CliError(f"{path} is not YAML or JSON: {error}", hint="check the indentation there") from None
        return parse_projects(document, path.name)


def _read_trace(path: Path) -> Trace:
    with _reading_trace(path):
        return read_trace(path)


@contextmanager
def _reading_trace(path: Path) -> Iterator[None]:
    """Turn errors of files and of their content into errors of the command line."""
    try:
        with reading(path, "give a readable file"):
            yield
    except TraceError as error:
        raise CliError(str(error), hint="docs/simulation.md explains the files of a simulation") from None


@contextmanager
def _progress(session: Session, num_jobs: int) -> Iterator[Progress | None]:
    """Show the progress as a moving line on standard error, if that is a terminal."""
    console = session.output.stderr
    if not console.is_terminal:
        yield None
        return

    with Bar(console=console, transient=True) as bar:
        task = bar.add_task("shoal", total=num_jobs)
        yield lambda now, finished: bar.update(task, completed=finished)
