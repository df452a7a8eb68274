"""Commands that predict, and need no server: `plan` says memory and step time of a job, from what `profile` has
measured on this machine; `simulate` replays a job trace under the scheduler's policy in virtual time, or lets one job
live through failures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
import yaml
from rich.progress import Progress as Bar

from shoal_api.cli.render.plan import Simulated, documents, render_hardware_profile, render_plan, render_simulation
from shoal_api.cli.render.twin import draw_twin, render_twin, twin_document
from shoal_api.cli.session import (
    CliError,
    ExitCode,
    Session,
    SetOption,
    SpecArgument,
    command,
    explain_read_errors,
    keep_given,
    refuse_with,
)
from shoal_api.cli.spec_file import load_spec
from shoal_service.control.job_twin import make_twin_job
from shoal_service.control.planning import PlanRequest, answer, load_profiles, measure_profile, save_profile
from shoal_service.core.scheduling.decide import decide
from shoal_service.core.scheduling.market import Project
from shoal_service.settings import load_settings
from shoal_service.simulator.engine import Costs, Market, Progress
from shoal_service.simulator.engine import simulate as replay
from shoal_service.simulator.failures import Cause, RatesError, draw_failures, parse_rates
from shoal_service.simulator.metrics import measure
from shoal_service.simulator.traces import Capacity, TraceError, parse_projects, read_capacity, read_trace
from shoal_service.simulator.twin import TwinJob, run_twin

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
        typer.Option(
            "--compare",
            metavar="'tp8 pp2'",
            help="Also predict the best layout with these degrees, also if the engine refuses it.",
        ),
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
    plan = answer(request, load_profiles(load_settings(**keep_given(state_dir=state_dir)).state_dir))
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
    path = save_profile(load_settings(**keep_given(state_dir=state_dir)).state_dir, measured)
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
_SWITCH_S, _START_S = 0.3, 4.3
_GPUS, _DAYS = 16384, 30.0


@command(url=False)
def simulate(
    session: Session,
    trace: Annotated[
        Path | None, typer.Argument(metavar="TRACE", help="CSV file with one job a line; see simulation.md.")
    ] = None,
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
    ] = _SWITCH_S,
    start_s: Annotated[
        float, typer.Option("--start-s", min=0, help="Seconds from the first workers of a job to its first step.")
    ] = _START_S,
    restart_costs: Annotated[
        bool,
        typer.Option("--restart-costs", help="Both cost what the trace's column restart_s says, where it has a value."),
    ] = False,
    every_s: Annotated[
        float | None,
        typer.Option("--every-s", min=1, help="Also call the policy when this many seconds pass without an event."),
    ] = None,
    job: Annotated[Path | None, typer.Option("--job", help="Spec of one job, in place of a trace.")] = None,
    gpus: Annotated[int, typer.Option("--gpus", min=1, help="With --job: GPUs that the job is granted.")] = _GPUS,
    failures: Annotated[
        Path | None, typer.Option("--failures", help="With --job: YAML file with the rates of failures.")
    ] = None,
    days: Annotated[float, typer.Option("--days", min=0.01, help="With --job: simulated days.")] = _DAYS,
    seed: Annotated[int, typer.Option("--seed", help="With --job: draws the failures.")] = 0,
    picture: Annotated[Path | None, typer.Option("--picture", help="With --job: SVG file to write.")] = None,
    state_dir: StateDirOption = None,
) -> None:
    """Replay a job trace under the scheduler's policy, and show completion times; or let one job live through failures.

    Virtual time: a day takes seconds, and nothing is trained. Exit code 1 if a job waits for ever. With --job the
    attempt machine meets drawn failures, and what they cost is shown.
    """
    if job is not None and failures is not None and trace is None:
        refuse_with(
            "--job",
            nodes=nodes,
            workers_per_node=workers_per_node != _WORKERS_PER_NODE,
            capacity=capacity,
            projects=projects,
            switch_s=switch_s != _SWITCH_S,
            start_s=start_s != _START_S,
            restart_costs=restart_costs,
            every_s=every_s,
        )
        twin_job = make_twin_job(
            load_spec(str(job), ()), gpus, load_profiles(load_settings(**keep_given(state_dir=state_dir)).state_dir)
        )
        with _reading_trace(failures):
            causes = parse_rates(_read_yaml(failures), failures.name)
        _simulate_job(session, twin_job, causes, days=days, seed=seed, picture=picture)
        return
    if job is not None or failures is not None or trace is None:
        raise CliError(
            "simulate needs either TRACE, or --job and --failures",
            hint="shoal simulate --job spec.yaml --gpus 16384 --failures examples/failure-rates.yaml",
        )
    refuse_with("TRACE", gpus=gpus != _GPUS, days=days != _DAYS, seed=seed, picture=picture, state_dir=state_dir)
    market = Market(
        capacity=_capacity(capacity, nodes, workers_per_node),
        costs=Costs(switch_s=switch_s, start_s=start_s, use_restart_s=restart_costs),
        projects=_projects(projects),
        every_s=every_s,
    )
    with _reading_trace(trace):
        jobs = read_trace(trace)
    with _progress(session, len(jobs.jobs)) as progress:
        run = replay(jobs.jobs, decide, market, progress=progress)
    result = Simulated("shoal", run, measure(run, market))
    page = render_simulation(jobs, market, [result], restart_costs=restart_costs)
    session.show(documents(jobs, market, [result]), page)
    if result.metrics.num_unfinished:
        raise typer.Exit(ExitCode.FAILED)


def _simulate_job(
    session: Session, job: TwinJob, causes: Sequence[Cause], *, days: float, seed: int, picture: Path | None
) -> None:
    failures = draw_failures(causes, gpus=job.total_gpus, nodes=job.total_nodes, days=days, seed=seed)
    result = run_twin(job, failures, days)
    if picture is not None:
        picture.write_text(draw_twin(job, result), encoding="utf-8")
    session.show(twin_document(job, result), render_twin(job, result))


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
        return parse_projects(_read_yaml(path), path.name)


def _read_yaml(path: Path) -> object:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise CliError(f"{path} is not YAML or JSON: {error}", hint="check the indentation there") from None


@contextmanager
def _reading_trace(path: Path) -> Iterator[None]:
    """Turn errors of files and of their content into errors of the command line."""
    try:
        with explain_read_errors(path, "give a readable file"):
            yield
    except (TraceError, RatesError) as error:
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
