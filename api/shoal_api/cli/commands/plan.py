"""`plan` predicts memory and step time of a job; `profile` measures this machine. Both need no server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal_api.cli.errors import CliError
from shoal_api.cli.exit_codes import ExitCode
from shoal_api.cli.options import SetOption, SpecArgument, given
from shoal_api.cli.render.plan import plan_page, profile_page
from shoal_api.cli.session import Session, command
from shoal_api.cli.spec_file import load_spec
from shoal_service.control.hardware_profiles import load_profiles, measure_profile, save_profile
from shoal_service.control.planning import PlanRequest, answer
from shoal_service.settings import load_settings

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
    session.show(plan, plan_page)
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
    session.show(measured, lambda profile: profile_page(profile, str(path)))


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
