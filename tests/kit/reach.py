"""What the code of a job reaches, by the way in which Shoal was started: the table of docs/security.md, which a test
compares with the page, and another one with what a hostile task has reached (tests/ray/isolation/test_hostile_task.py).
"""

from dataclasses import dataclass

SHAPES = {
    "embedded": "`shoal serve`, one user",
    "isolated": "`shoal serve --isolate`",
    "apart": "cluster apart: compose, KubeRay",
}


@dataclass(frozen=True)
class Row:
    """Attempts with one answer."""

    attempts: tuple[str, ...]
    """Names in tests/kit/ray_tasks/hostile.py."""
    words: str
    reached: frozenset[str]
    """In which shapes."""
    way_out: str


def _row(words: str, attempts: str, reached: str, way_out: str) -> Row:
    return Row(tuple(attempts.split()), words, frozenset(reached.split()), way_out)


_ALL = " ".join(SHAPES)
_TENANTS = "a Ray cluster for each tenant ([clusters join](install.md#what-is-installed-where))"

ROWS = (
    _row(
        "files of the service: database, `admin-token`, the gateway's token, webhooks' secrets, the certificate's key",
        "state-dir database admin-token gateway-token webhook-secrets tls-key",
        "embedded",
        "`--isolate`, or a cluster apart",
    ),
    _row(
        "with these: the API as admin, the orders to the cluster",
        "api-as-admin orders-as-gateway",
        "embedded",
        "the same",
    ),
    _row(
        "the processes of the server and of the gateway: `/proc/PID/environ`, `fd`, `mem`, ptrace",
        "server-process gateway-process",
        "",
        "",
    ),
    _row(
        "a secret of the service in the environment or the arguments of any process",
        "secrets-in-environments secrets-in-arguments",
        "",
        "",
    ),
    _row(
        "with the token of its own attempt: the API of users, another attempt, the orders and archives of its cluster",
        "api-with-own-token attempts-with-own-token orders-with-own-token",
        "",
        "",
    ),
    _row("the token of its Ray cluster", "ray-token", _ALL, "it needs it; it opens no other cluster"),
    _row(
        "actors without CPUs on every node of its cluster, by affinity and by label",
        "actor-on-every-node",
        _ALL,
        _TENANTS,
    ),
    _row(
        "another attempt of its cluster: token, journal and code in Ray's store; to run code in its supervisor and its "
        "workers (`__ray_call__`), and to end them (`ray.kill`)",
        "neighbours-token neighbours-journal neighbours-code neighbours-supervisor neighbours-worker "
        "kill-neighbours-supervisor",
        _ALL,
        _TENANTS,
    ),
    _row("with that token: reports and directives of that attempt", "attempt-with-neighbours-token", _ALL, _TENANTS),
    _row("with that token: the API of users, the orders to the cluster", "api-with-neighbours-token", "", ""),
    _row(
        "environments and secrets of other jobs' workers on its machine (`/proc`)",
        "neighbours-environment",
        _ALL,
        _TENANTS,
    ),
    _row(
        "checkpoints of other jobs in the same directory",
        "neighbours-checkpoints",
        _ALL,
        "`checkpoint.url` and credentials of its own for each tenant, in a cluster of its own",
    ),
)


def expected(shape: str) -> dict[str, bool]:
    """By attempt: whether it succeeds."""
    return {name: shape in row.reached for row in ROWS for name in row.attempts}


def table() -> str:
    """In Markdown."""
    head = ["code of a job tries", *SHAPES.values(), "way out"]
    lines = [head, ["---"] * len(head)]
    way_out = ""
    for row in ROWS:
        answers = ["**reached**" if shape in row.reached else "refused" for shape in SHAPES]
        lines.append([row.words, *answers, "the same" if row.way_out and row.way_out == way_out else row.way_out])
        way_out = row.way_out or way_out
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
