"""The commands of `shoal`. `entry.py` is the console script; `python -m shoal_api.cli.main` does the same.

tools/cli_page.py reads the same registry and writes docs/reference/cli.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated

import typer

from shoal_api.cli.commands import (
    access,
    accounts,
    check,
    clusters,
    control,
    export,
    files,
    inspect,
    join,
    live,
    models,
    nodes,
    plan,
    queue,
    serve,
    several,
    simulate,
    specs,
    submit,
    upkeep,
)
from shoal_api.cli.session import DEFAULT_URL, command

_HELP = """Elastic training on Ray: a job survives dead workers and produces the same model as an undisturbed run.

`shoal demo` shows this. `shoal serve` starts a server; `shoal submit SPEC --follow` trains a job on it.
"""

PANELS: dict[str, dict[str, Callable[..., None]]] = {
    "Every day": {
        "submit": submit.submit,
        "jobs": inspect.jobs,
        "show": inspect.show,
        "logs": inspect.logs,
        "watch": submit.watch,
        "top": live.top,
        "cancel": several.cancel,
        "retry": control.retry,
        "queue": queue.queue,
        "cluster": inspect.cluster,
    },
    "Change jobs": {
        "pause": several.pause,
        "resume": several.resume,
        "scale": control.scale,
        "priority": queue.priority,
        "relayout": control.relayout,
        "move": clusters.move,
        "update": control.update,
        "extend": control.extend,
        "sweep": submit.sweep,
        "rename": control.rename,
        "label": control.label,
        "annotate": control.annotate,
        "archive": several.archive,
        "unarchive": several.unarchive,
        "delete": upkeep.delete,
    },
    "Look into jobs": {
        "events": inspect.events,
        "workers": inspect.workers,
        "incidents": accounts.incidents,
        "stacks": live.stacks,
        "profile-job": live.profile_job,
        "profiles": live.profiles,
        "goodput": accounts.goodput,
        "parity": accounts.parity,
        "series": accounts.series,
    },
    "Checkpoints and models": {
        "checkpoints": inspect.checkpoints,
        "pin": control.pin,
        "verify": control.verify,
        "delete-checkpoint": control.delete_checkpoint,
        "take": control.take,
        "export": export.export,
        "files": files.files,
        "fetch": files.fetch,
        "model register": models.register,
        "model list": models.list_models,
        "model get": models.get,
        "model alias": models.alias,
        "model remove": models.remove,
    },
    "Specs and data": {
        "init": specs.init,
        "validate": specs.validate,
        "check": specs.check,
        "plan": plan.plan,
        "profile": plan.profile,
        "simulate": simulate.simulate,
        "schema": specs.schema,
        "data prepare": specs.prepare,
        "data show": specs.show,
    },
    "Server": {
        "serve": serve.serve,
        "demo": check.demo,
        "doctor": check.doctor,
        "open": access.open_page,
        "login": access.login,
        "logout": access.logout,
        "whoami": access.whoami,
        "token create": access.create,
        "token list": access.list_tokens,
        "token revoke": access.revoke,
        "audit": access.audit,
        "webhooks": inspect.webhooks,
        "gc": upkeep.gc,
        "backup": upkeep.backup,
        "restore": upkeep.restore,
        "version": check.version,
    },
    "Clusters and quotas": {
        "join": join.join,
        "clusters list": clusters.list_clusters,
        "clusters cordon": clusters.cordon,
        "clusters uncordon": clusters.uncordon,
        "clusters label": clusters.label,
        "clusters remove": clusters.remove,
        "clusters tokens": clusters.tokens,
        "nodes": nodes.nodes,
        "drain": nodes.drain,
        "cordon": nodes.cordon,
        "quota list": queue.list_quotas,
        "quota set": queue.set_quota,
        "quota delete": queue.delete_quota,
        "quota list-users": queue.list_users,
        "quota set-user": queue.set_user,
        "quota delete-user": queue.delete_user,
    },
}
"""The commands, in the order in which the help lists them. A name of two words is a command of a group."""
_GROUPS: dict[str, Callable[..., None]] = {
    "data": specs.data,
    "model": models.model,
    "quota": queue.quota,
    "token": access.token,
    "clusters": clusters.clusters,
}
_LISTS = {"clusters"}
"""Groups that do something without a further word."""
_CLASSES = {"submit": submit.ScriptCommand}
_SUBMIT = "`shoal submit train.py --workers 2` starts a program, and `shoal submit job.yaml` a job spec"
_LIST = "`shoal jobs` lists the jobs, and `shoal top` displays those that go on, live"
_STOP = "`shoal cancel JOB` ends a job, and `shoal pause JOB` keeps it for later"
_WHY = (
    "`shoal show JOB` says what a job does, what it waits for, or why it failed; `shoal queue` says it of all that wait"
)
_OTHER_WORDS = {
    **dict.fromkeys(("run", "train", "launch"), _SUBMIT),
    **dict.fromkeys(("ps", "ls", "list"), _LIST),
    **dict.fromkeys(("stop", "kill"), _STOP),
    **dict.fromkeys(("status", "why", "describe"), _WHY),
}
"""Commands of other tools that people try first, hidden, each with the answer: what Shoal has instead."""


def main() -> None:
    """Run the command line; ends the process with one of `ExitCode`."""
    build_app()(prog_name="shoal")


def build_app() -> typer.Typer:
    """The commands, in the order of `PANELS`."""
    app = typer.Typer(
        help=_HELP,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    groups: dict[str, typer.Typer] = {}
    for panel, commands in PANELS.items():
        for name, function in commands.items():
            group, _, word = name.rpartition(" ")
            if not group:
                app.command(name, cls=_CLASSES.get(name), rich_help_panel=panel, short_help=_short(function))(function)
                continue
            if group not in groups:
                lists = group in _LISTS
                groups[group] = typer.Typer(no_args_is_help=not lists, invoke_without_command=lists)
                groups[group].callback()(_GROUPS[group])
                app.add_typer(groups[group], name=group, rich_help_panel=panel)
            groups[group].command(word)(function)
    anything = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    for word in _OTHER_WORDS:
        app.command(word, hidden=True, context_settings=anything)(_suggest)
    return app


def _short(function: Callable[..., None]) -> str:
    """Return the first sentence of a command's help, without its example."""
    text = " ".join((function.__doc__ or "").split("\n\n")[0].split())
    return re.split(r"(?<=[^.]\.) |: `|; ", text)[0].removesuffix(".")


def _suggest(ctx: typer.Context) -> None:
    """Refuse a command of another tool, and name Shoal's."""
    from shoal_api.cli.errors import CliError

    with command(DEFAULT_URL, False):
        raise CliError(
            f"there is no command {ctx.info_name!r}: {_OTHER_WORDS[str(ctx.info_name)]}", hint="shoal --help"
        )


def _show_version(wanted: bool) -> None:
    if wanted:
        from shoal_workers.version import VERSION

        typer.echo(f"shoal {VERSION}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the release and exit.")
    ] = False,
) -> None:
    """Replaced by the help of the application."""


if __name__ == "__main__":
    main()
