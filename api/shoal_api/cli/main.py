"""The console script `shoal`: registers the commands. `python -m shoal_api.cli.main` does the same.

tools/cli_page.py reads the same registry and writes docs/reference/cli.md.
"""

from __future__ import annotations

from collections.abc import Callable

import typer

from shoal_api.cli.commands import (
    check,
    control,
    export,
    goodput,
    incidents,
    inspect,
    nodes,
    parity,
    plan,
    serve,
    specs,
    submit,
)

_HELP = """Elastic training on Ray: a job survives dead workers and produces the same model as an undisturbed run.

`shoal demo` shows this. `shoal serve` starts a server; `shoal submit SPEC --follow` trains a job on it.
"""

_SPECS = "Specs and data"
_PANELS: dict[str, tuple[Callable[..., None], ...]] = {
    "Jobs": (
        submit.submit,
        submit.watch,
        inspect.jobs,
        inspect.show,
        inspect.logs,
        inspect.events,
        control.scale,
        control.relayout,
        control.pause,
        control.resume,
        control.cancel,
        inspect.workers,
        incidents.incidents,
        goodput.goodput,
        parity.parity,
        inspect.checkpoints,
        export.export,
    ),
    _SPECS: (specs.validate, plan.plan, plan.profile, specs.schema),
    "Server": (serve.serve, inspect.cluster, nodes.nodes, nodes.drain, check.demo, check.doctor, check.version),
}


def main() -> None:
    """Run the command line; ends the process with one of `ExitCode`."""
    build_app()(prog_name="shoal")


def build_app() -> typer.Typer:
    """The commands, in the order in which the help lists them."""
    app = typer.Typer(
        help=_HELP,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for panel, functions in _PANELS.items():
        for function in functions:
            app.command(rich_help_panel=panel)(function)
    data = typer.Typer(help="Prepare training data.", no_args_is_help=True)
    data.callback()(specs.data)
    data.command()(specs.prepare)
    app.add_typer(data, name="data", rich_help_panel=_SPECS)
    return app


if __name__ == "__main__":
    main()
