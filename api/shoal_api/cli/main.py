"""The commands of `shoal`. `entry.py` is the console script; `python -m shoal_api.cli.main` does the same.

The module of a command is imported when the command is called, because the help must appear without a delay: the
short help of all commands is read from the sources. tools/cli_page.py writes docs/reference/cli.md from the same table.
"""

from __future__ import annotations

import ast
import copy
import functools
import itertools
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from shoal_api.cli.entry import exit_on_interrupt
from shoal_api.cli.session import DEFAULT_URL, JsonFlag, UrlOption

_HELP = """Elastic training on Ray: a job survives dead workers and produces the same model as an undisturbed run.

`shoal demo` shows this. `shoal serve` starts a server; `shoal submit SPEC --follow` trains a job on it.
"""

PANELS: dict[str, dict[str, str]] = {
    "Every day": {
        "submit": "submit.submit",
        "jobs": "inspect.jobs",
        "show": "inspect.show",
        "logs": "inspect.logs",
        "watch": "submit.watch",
        "top": "inspect.top",
        "cancel": "control.cancel",
        "retry": "control.retry",
        "queue": "fleet.queue",
        "cluster": "inspect.cluster",
    },
    "Change jobs": {
        "pause": "control.pause",
        "resume": "control.resume",
        "scale": "control.scale",
        "priority": "fleet.priority",
        "relayout": "control.relayout",
        "move": "fleet.move",
        "update": "control.update",
        "extend": "control.extend",
        "sweep": "sweep.sweep",
        "rename": "control.rename",
        "label": "control.label",
        "annotate": "control.annotate",
        "alert": "control.alert",
        "archive": "control.archive",
        "unarchive": "control.unarchive",
        "delete": "control.delete",
    },
    "Look into jobs": {
        "events": "inspect.events",
        "workers": "inspect.workers",
        "incidents": "inspect.incidents",
        "rounds": "inspect.rounds",
        "stacks": "inspect.stacks",
        "profile-job": "inspect.profile_job",
        "profiles": "inspect.profiles",
        "goodput": "inspect.goodput",
        "parity": "inspect.parity",
        "series": "inspect.series",
    },
    "Checkpoints": {
        "checkpoints": "inspect.checkpoints",
        "pin": "control.pin",
        "verify": "control.verify",
        "delete-checkpoint": "control.delete_checkpoint",
        "take": "control.take",
        "export": "artifacts.export",
        "files": "artifacts.files",
        "fetch": "artifacts.fetch",
        "model register": "artifacts.register",
        "model list": "artifacts.list_models",
        "model get": "artifacts.get",
        "model alias": "artifacts.alias",
        "model remove": "artifacts.remove",
    },
    "Specs and data": {
        "init": "specs.init",
        "validate": "specs.validate",
        "check": "specs.check",
        "plan": "prediction.plan",
        "profile": "prediction.profile",
        "simulate": "prediction.simulate",
        "schema": "specs.schema",
        "data prepare": "specs.prepare",
        "data show": "specs.show",
    },
    "Server": {
        "serve": "server.serve",
        "demo": "server.demo",
        "doctor": "doctor.doctor",
        "open": "access.open_page",
        "login": "access.login",
        "logout": "access.logout",
        "whoami": "access.whoami",
        "token create": "access.create_token",
        "token list": "access.list_tokens",
        "token revoke": "access.revoke_token",
        "audit": "access.audit",
        "webhooks": "inspect.webhooks",
        "gc": "control.gc",
        "backup": "server.backup",
        "restore": "server.restore",
        "version": "doctor.version",
    },
    "Clusters": {
        "join": "join.join",
        "clusters list": "fleet.list_clusters",
        "clusters cordon": "fleet.cordon_cluster",
        "clusters uncordon": "fleet.uncordon",
        "clusters label": "fleet.label",
        "clusters remove": "fleet.remove",
        "clusters tokens": "fleet.tokens",
        "usage": "fleet.usage",
        "nodes": "fleet.nodes",
        "drain": "fleet.drain",
        "cordon": "fleet.cordon",
        "quota list": "fleet.list_quotas",
        "quota set": "fleet.set_quota",
        "quota delete": "fleet.delete_quota",
        "quota list-users": "fleet.list_users",
        "quota set-user": "fleet.set_user",
        "quota delete-user": "fleet.delete_user",
    },
}
"""The panels of the help: the commands of every day, then the others. Each command with its module in cli/commands/ and
its function; a name of two words is a command of a group."""
COMMANDS = {name: path for commands in PANELS.values() for name, path in commands.items()}
_OTHERS = "Other commands (shoal COMMAND --help explains one)"
GROUPS = {
    "data": "Prepare training data, and look at it.",
    "model": "The registry of models: register checkpoints, name versions, fetch them.",
    "quota": "Show and change the quotas of projects, and the limits of users.",
    "token": "API tokens: who may use the server.",
    "clusters": "The clusters that have joined; without a further word: list them.",
}
_ALIASES = {
    **dict.fromkeys(("ps", "ls", "list"), ("jobs", "jobs")),
    **dict.fromkeys(("status", "describe"), ("show", "jobs")),
    "why": ("show", "queue"),
}
"""Words of other tools for commands that only read: the command if a job is named, and the one if none is."""
_SUBMIT = "`shoal submit train.py --workers 2` starts a program, and `shoal submit job.yaml` a job spec"
_STOP = "`shoal cancel {0}` ends a job for good, and `shoal pause {0}` saves it until `shoal resume {0}`"
_OTHER_WORDS = {
    **dict.fromkeys(("run", "train", "launch"), _SUBMIT),
    **dict.fromkeys(("stop", "kill"), _STOP),
}
"""Words of other tools that could mean several commands, each with a sentence that names them."""


def main() -> None:
    """Run the command line; ends the process with one of `ExitCode`."""
    build_app()(prog_name="shoal")


def build_app() -> typer.Typer:
    """Return the application with the commands, in the order of `PANELS`."""
    app = typer.Typer(
        cls=LazyGroup,
        help=_HELP,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    groups: dict[str, typer.Typer] = {}
    for panel, commands in PANELS.items():
        for name in commands:
            group, _, word = name.rpartition(" ")
            if group and group not in groups:
                groups[group] = _make_group(group)
                app.add_typer(groups[group], name=group, rich_help_panel=panel)
            target = groups[group] if group else app
            target.command(word, help=short_help(name), rich_help_panel=None if group else panel)(_placeholder)
    anything = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    for word in (*_ALIASES, *_OTHER_WORDS):
        app.command(word, hidden=True, context_settings=anything)(_refuse_foreign_word)
    return app


class LazyGroup(TyperGroup):
    """A group whose commands are placeholders for the help. The module of the called command is imported."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        word, command, rest = super().resolve_command(ctx, args)
        if ctx.parent is None and word in _ALIASES:
            word = _ALIASES[word][0 if _names_a_job(rest) else 1]
        name = f"{ctx.info_name} {word}" if ctx.parent is not None else word
        return word, _load_command(name) if name in COMMANDS else command, rest

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write a line for each command of every day, and one for each group of the others."""
        if ctx.parent is not None:
            super().format_help(ctx, formatter)
            return
        (_, daily), *others = PANELS.items()
        page = copy.copy(self)
        page.commands = {name: self.commands[name] for name in daily}
        for panel, names in others:
            commands = ", ".join(dict.fromkeys(name.split()[0] for name in names))
            page.commands[panel] = TyperCommand(panel, help=commands, rich_help_panel=_OTHERS)
        TyperGroup.format_help(page, ctx, formatter)


class ScriptCommand(TyperCommand):
    """A command whose options end where those of a script begin: an option that is not known was probably meant for the
    script, so the error says where those go."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)  # the parser consumes it
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            option = getattr(error, "option_name", None)
            has_script = any(word.endswith(".py") or word in ("-m", "--module") for word in given)
            if option is not None and has_script and hasattr(error, "message"):
                error.message += f". Arguments of the script come after --: shoal submit train.py -- {option}"
            raise


@functools.cache
def _load_command(name: str) -> Any:
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")
    app.command(name.rpartition(" ")[2], cls=ScriptCommand if name == "submit" else None)(load_function(name))
    return get_command(app)


def load_function(name: str) -> Callable[..., None]:
    """Import the module of a command, and return the function of the command."""
    module, _, function = COMMANDS[name].partition(".")
    with exit_on_interrupt():
        loaded: Callable[..., None] = getattr(import_module(f"shoal_api.cli.commands.{module}"), function)
    return loaded


def short_help(name: str) -> str:
    """Return the first sentence of a command's docstring, without its example."""
    module, _, function = COMMANDS[name].partition(".")
    text = " ".join(_docstrings(module)[function].split("\n\n")[0].split())
    return re.split(r"(?<=[^.]\.) |: `|; ", text)[0].removesuffix(".")


@functools.cache
def _docstrings(module: str) -> dict[str, str]:
    """Return the docstrings of the functions of a module of cli/commands/, without importing it."""
    tree = ast.parse(Path(__file__).with_name("commands").joinpath(f"{module}.py").read_bytes())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {function.name: ast.get_docstring(function) or "" for function in functions}


def _make_group(name: str) -> typer.Typer:
    """`shoal clusters` without a further word lists the clusters; other groups show their help."""
    is_clusters = name == "clusters"
    group = typer.Typer(
        cls=LazyGroup, help=GROUPS[name], no_args_is_help=not is_clusters, invoke_without_command=is_clusters
    )
    group.callback()(_list_clusters if is_clusters else _placeholder)
    return group


def _placeholder() -> None:
    """Replaced by the command or the help of the group."""


def _list_clusters(context: typer.Context, url: UrlOption = DEFAULT_URL, as_json: JsonFlag = False) -> None:
    if context.invoked_subcommand is None:
        load_function("clusters list")(url=url, as_json=as_json)


def _names_a_job(arguments: list[str]) -> bool:
    pairs = itertools.pairwise(["", *arguments])
    return any(not word.startswith("-") and before != "--url" for before, word in pairs)


def _refuse_foreign_word(context: typer.Context) -> None:
    """Refuse a word of another tool, and name Shoal's commands, with the job that was given."""
    from shoal_api.cli.session import CliError, Output

    word = str(context.info_name)
    job = next((argument for argument in context.args if not argument.startswith("-")), "JOB")
    error = CliError(f"there is no command {word!r}: {_OTHER_WORDS[word].format(job)}", hint="shoal --help")
    Output(as_json=False).fail(error)
    raise typer.Exit(error.exit_code)


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
