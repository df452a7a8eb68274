"""The commands of `shoal`. `entry.py` is the console script; `python -m shoal_api.cli.main` does the same.

tools/cli_page.py reads the same registry and writes docs/reference/cli.md.
"""

from __future__ import annotations

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

_HELP = """Elastic training on Ray: a job survives dead workers and produces the same model as an undisturbed run.

`shoal demo` shows this. `shoal serve` starts a server; `shoal submit SPEC --follow` trains a job on it.
"""

PANELS: dict[str, dict[str, Callable[..., None]]] = {
    "Jobs": {
        "top": live.top,
        "submit": submit.submit,
        "sweep": submit.sweep,
        "watch": submit.watch,
        "jobs": inspect.jobs,
        "show": inspect.show,
        "queue": queue.queue,
        "priority": queue.priority,
        "logs": inspect.logs,
        "events": inspect.events,
        "scale": control.scale,
        "relayout": control.relayout,
        "move": clusters.move,
        "update": control.update,
        "label": control.label,
        "annotate": control.annotate,
        "pause": several.pause,
        "resume": several.resume,
        "cancel": several.cancel,
        "archive": several.archive,
        "unarchive": several.unarchive,
        "delete": upkeep.delete,
        "extend": control.extend,
        "retry": control.retry,
        "workers": inspect.workers,
        "incidents": accounts.incidents,
        "stacks": live.stacks,
        "profile-job": live.profile_job,
        "profiles": live.profiles,
        "goodput": accounts.goodput,
        "parity": accounts.parity,
        "series": accounts.series,
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
        "join": join.join,
        "clusters list": clusters.list_clusters,
        "clusters cordon": clusters.cordon,
        "clusters uncordon": clusters.uncordon,
        "clusters label": clusters.label,
        "clusters remove": clusters.remove,
        "clusters tokens": clusters.tokens,
        "cluster": inspect.cluster,
        "nodes": nodes.nodes,
        "drain": nodes.drain,
        "cordon": nodes.cordon,
        "maintenance list": nodes.list_windows,
        "maintenance add": nodes.add_window,
        "maintenance cancel": nodes.cancel_window,
        "webhooks": inspect.webhooks,
        "gc": upkeep.gc,
        "backup": upkeep.backup,
        "restore": upkeep.restore,
        "quota list": queue.list_quotas,
        "quota set": queue.set_quota,
        "quota delete": queue.delete_quota,
        "quota list-users": queue.list_users,
        "quota set-user": queue.set_user,
        "quota delete-user": queue.delete_user,
        "open": access.open_page,
        "login": access.login,
        "logout": access.logout,
        "whoami": access.whoami,
        "token create": access.create,
        "token list": access.list_tokens,
        "token revoke": access.revoke,
        "audit": access.audit,
        "demo": check.demo,
        "doctor": check.doctor,
        "version": check.version,
    },
}
"""The commands, in the order in which the help lists them. A name of two words is a command of a group."""
_GROUPS: dict[str, Callable[..., None]] = {
    "data": specs.data,
    "model": models.model,
    "quota": queue.quota,
    "maintenance": nodes.maintenance,
    "token": access.token,
    "clusters": clusters.clusters,
}
_LISTS = {"clusters"}
"""Groups that do something without a further word."""
_CLASSES = {"submit": submit.ScriptCommand}
_OTHER_WORDS = ("run", "train", "launch")
"""Words that are tried for `submit`; each answers with the command that exists."""


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
                app.command(name, cls=_CLASSES.get(name), rich_help_panel=panel)(function)
                continue
            if group not in groups:
                lists = group in _LISTS
                groups[group] = typer.Typer(no_args_is_help=not lists, invoke_without_command=lists)
                groups[group].callback()(_GROUPS[group])
                app.add_typer(groups[group], name=group, rich_help_panel=panel)
            groups[group].command(word)(function)
    anything = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    for word in _OTHER_WORDS:
        app.command(word, hidden=True, context_settings=anything)(submit.another_word)
    return app


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
