"""Settings of a control plane: from keyword arguments, else from the environment (SHOAL_...), else the defaults.

The only module of the service that reads the environment. `shoal serve` makes the settings once and passes them on.
"""

from __future__ import annotations

import ipaddress
import os
import re
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from shoal_service.core.access import Role
from shoal_service.core.attempt.state import AGENTS_FROM
from shoal_service.core.nodes import DEFAULT_PROBATION_LIMIT, probation_limit
from shoal_service.core.retention import DEFAULT_EVERY_S, DEFAULT_RULES, LEAST_AUDIT_DAYS, RetentionRules
from shoal_service.core.webhooks import ANY, ServiceWebhook, WebhookRules, unknown_patterns
from shoal_service.problems import SettingsError
from shoal_workers.contract import (
    CLUSTER_PATTERN,
    SECRET_VARIABLE,
    LogFormat,
    LogLevel,
    LogSettings,
    SnapshotScope,
    is_reference,
)
from shoal_workers.contract.checks.places import DEFAULT_PATHS, DEFAULT_PROTOCOLS, AllowedPlaces, PipSource, absolute

SECRETS_DIR = "SHOAL_SECRETS_DIR"
"""A directory with secrets as files, as containers mount them: the file `shoal_database_url` has the value of
SHOAL_DATABASE_URL. A variable of the environment takes precedence over a file."""
_MIN_LEASE_TTL_S = 3.0
"""The control loop makes a pass every second and renews after a third of the time to live, so one pass may be late."""


class Settings(BaseSettings):
    """Frozen; unknown keyword arguments are refused. Durations in seconds."""

    model_config = SettingsConfigDict(
        env_prefix="SHOAL_", frozen=True, extra="forbid", use_attribute_docstrings=True, env_ignore_empty=True
    )

    state_dir: Path = Field(default_factory=lambda: Path.home() / ".local" / "state" / "shoal")
    """Directory of the database, the checkpoints, the code and the embedded cluster's note, unless other settings
    name other places."""
    database_url: str = Field(default_factory=lambda given: f"sqlite:///{_below_state(given, 'shoal.db')}")
    """sqlite:////absolute/path or postgresql://user@host/database. Default: shoal.db in state_dir."""
    host: str = "127.0.0.1"
    """Address to listen on. One beyond loopback needs tls_cert and tls_key, or allow_plain_http."""
    tls_cert: Path | None = None
    """File with the certificate of the server, and those that lead to its authority, in PEM. With tls_key: HTTPS."""
    tls_key: Path | None = None
    """File with the private key of the certificate."""
    allow_plain_http: bool = False
    """Listen beyond loopback without TLS, because a proxy or the network encrypts. Tokens travel as they are."""
    limit_requests: float = Field(200.0, gt=0, le=1e6, allow_inf_nan=False)
    """Requests per second of one token, or of one address without a token; ten seconds' worth at once. Beyond a limit:
    429."""
    limit_streams: int = Field(200, ge=1, le=1_000_000)
    """Open streams of one token."""
    limit_uploads: int = Field(4, ge=1, le=10_000)
    """Code archives that one token uploads at the same time."""
    limit_body_bytes: int = Field(1 << 20, ge=1 << 16, le=1 << 20)
    """Bytes of a document that a request may have, at most 1 MiB."""
    limit_archive_bytes: int = Field(64 << 20, ge=1 << 16, le=64 << 20)
    """Bytes of an uploaded code archive, at most 64 MiB."""
    limit_at_once: int = Field(2000, ge=1, le=1_000_000)
    """Requests that are open at the same time, of all together."""
    limit_connections: int = Field(4096, ge=1, le=1_000_000)
    """Connections that are open at the same time, of all together; fewer if the process may not have that many
    descriptors (ulimit -n)."""
    limit_address_connections: int = Field(512, ge=1, le=1_000_000)
    """Connections of one address; those of trusted_proxies have no limit of their own."""
    oidc_issuer: str = ""
    """URL of an OpenID Connect issuer whose JWTs are accepted beside tokens. Empty: none."""
    oidc_audience: str = ""
    """What a JWT must name as its audience (claim aud)."""
    oidc_user_claim: str = "sub"
    """The claim with the user's name."""
    oidc_role_claim: str = "roles"
    """The claim whose values give the role."""
    oidc_roles: dict[str, Role] = Field(default_factory=dict)
    """Which value of that claim gives which role, as JSON: {"ml-admins": "admin", "ml": "operator"}."""
    oidc_projects_claim: str = ""
    """The claim with the projects that a JWT, unless it is an admin's, is bound to. Empty: to none."""
    trusted_proxies: str = ""
    """Addresses and networks (10.0.0.0/8) of proxies whose X-Forwarded-For and X-Forwarded-Proto are believed,
    separated by commas; * believes everyone, for a server that only its proxy reaches."""
    port: int = Field(8470, ge=0, le=65535)
    """0: a free port."""
    allowed_hosts: str = ""
    """Names of this server in the header Host, separated by commas; * allows every name. Addresses, localhost and the
    name of the machine are always allowed. Other names are refused, because a web page could use one of them to reach
    the server (DNS rebinding)."""
    grafana_url: str = Field("", pattern=r"^(https?://[^\s\"<>]+)?$")
    """URL of a Grafana that has the dashboards of deploy/grafana: the page of a job then leads to its panels there."""
    log_level: LogLevel = LogLevel.INFO
    """debug, info, warning or error; for the server, and for the supervisors and workers that it starts. At debug the
    server also logs each request."""
    log_format: LogFormat = LogFormat.TEXT
    """text, for people, or json: one object per line. See docs/logs.md."""

    home_url: str = ""
    """URL at which the nodes of the cluster reach this service: supervisors report there. Several, separated by commas,
    are those of control planes on one database. Default: the address that the server listens on, or, if that is every
    address, the one that it has towards the cluster."""
    home_ca: Path | None = None
    """File with certificates in PEM with which supervisors check that of home_url. Default: those of their machine.
    Without home_url they expect the very certificate in tls_cert."""

    ray_address: str | None = None
    """host:port of the Ray cluster to join with a gateway that the server starts. Without it, and without `cluster`, a
    cluster is started on this machine."""
    cluster: str = ""
    """Name of the cluster that runs the jobs, and that joins with `shoal join`: the server starts neither a cluster nor
    a gateway. Empty: it does."""
    cluster_token_file: Path | None = None
    """File with the token of that cluster's gateway, which `shoal join --token-file` shows: the server accepts it from
    its start on. Whoever deploys both makes it; docs/install.md says how. Default: an admin makes the token."""
    num_cpus: int | None = Field(None, ge=1, le=4096)
    """CPUs of the embedded cluster, over all its nodes. Default: those of this machine that the server may use."""
    num_gpus: int | None = Field(None, ge=0, le=1024)
    """GPUs of the embedded cluster, over all its nodes. Default: the NVIDIA GPUs of this machine."""
    nodes: int = Field(1, ge=1, le=64)
    """Number of Ray nodes that the embedded cluster simulates on this machine."""
    keep_cluster: bool = False
    """Leave the embedded cluster running when the server ends. The next server adopts it."""
    leave_dead_nodes: bool = False
    """Do not start a dead node of the embedded cluster again, for experiments. A dead head is always started again."""
    isolate: bool = False
    """Run the processes of the embedded cluster, and with them the code of jobs, as another user than the server, which
    must be root. See docs/security.md."""
    isolate_user: str = "nobody"
    """Name or number of that user."""
    isolate_gateway_user: str = "daemon"
    """Name or number of the user of the embedded cluster's gateway then: neither the server's nor the workers'."""
    isolate_dir: Path = Path("/var/lib/shoal-jobs")
    """Home directory of that user's processes then: installed packages, caches, checkpoints unless checkpoint_url names
    another place. Made for that user if it is not there."""
    stop_s: float = Field(120.0, ge=0, le=86400, allow_inf_nan=False)
    """A server that ends its embedded cluster first lets every job save its state, for this long at most. A second
    Ctrl-C ends the wait. 0: jobs are not saved, and continue from their newest checkpoint."""
    fork_workers: bool = True
    """Fork workers without GPUs from a process of their node that has imported torch, instead of starting an
    interpreter for each. Set it to false if the nodes of the cluster have their interpreters at different paths."""
    agents_from: int = Field(AGENTS_FROM, ge=0, le=1_000_000)
    """Jobs with at least this many workers get a process on each node that polls the workers there for the supervisor,
    which then makes one call per node. 0: no job does."""

    snapshot_scope: SnapshotScope = SnapshotScope.MACHINE
    """machine: snapshots in shared memory are read by the workers of all Ray nodes on their machine, and copies go to
    other machines. node: only by workers of their own Ray node, as if each node were a machine; for experiments with
    several nodes on one machine."""

    rack_label: str = "rack"
    """The label of a Ray node (`ray start --labels rack=r1`) whose value names its rack. Workers of one rack get
    neighbouring ranks. Nodes without the label count as one rack."""

    checkpoint_url: str = Field(default_factory=lambda given: str(_jobs_directory(given) / "checkpoints"))
    """Checkpoint directory of jobs without a checkpoint.url. Default: checkpoints/ in state_dir, or in isolate_dir with
    isolate."""

    allowed_paths: str = DEFAULT_PATHS
    """Directories, separated by commas, below which the local paths of a spec must be: checkpoints, data, models,
    working_dir, files of secrets. The server's own directory is never allowed, but for its checkpoints."""
    allowed_protocols: str = DEFAULT_PROTOCOLS
    """Protocols of the URLs of a spec, separated by commas; file stands for local paths, and https://host allows one
    host."""

    allow_pip: PipSource = PipSource.NEVER
    """Whether workers install what `code.pip` of a spec names: never, only from directories of wheels (wheels), or also
    from the index that pip is set up for on the nodes (index)."""

    lease_ttl_s: float = Field(10.0, ge=_MIN_LEASE_TTL_S, le=3600, allow_inf_nan=False)
    """If the lease on the jobs is not renewed for this long, another control plane can take it."""

    max_probation: str = DEFAULT_PROBATION_LIMIT
    """At most this many nodes are on probation at a time: a number (2), or a share of the nodes (25%; at least one)."""

    scale_out: bool = False
    """Ask Ray's autoscaler for the nodes that waiting jobs need, and let it release the others. For a cluster that
    Ray's autoscaler or KubeRay manages."""

    retain_logs_days: float = Field(DEFAULT_RULES.logs_days, ge=0, allow_inf_nan=False)
    """Days after a job's end after which its log is deleted. 0, here and below: never."""
    retain_checkpoints_days: float = Field(DEFAULT_RULES.checkpoints_days, ge=0, allow_inf_nan=False)
    """Days after a job's end after which its checkpoints are deleted, but for the newest good one and for pinned
    ones."""
    retain_series_days: float = Field(DEFAULT_RULES.series_days, ge=0, allow_inf_nan=False)
    """Days after a job's end after which the values of its single steps are deleted; means over eight steps stay."""
    retain_events_days: float = Field(DEFAULT_RULES.events_days, ge=0, allow_inf_nan=False)
    """Days after a job's end after which its events are deleted."""
    retain_jobs_days: float = Field(DEFAULT_RULES.jobs_days, ge=0, allow_inf_nan=False)
    """Days after its end after which a job is deleted with its checkpoints, but for pinned ones."""
    retain_archives_days: float = Field(DEFAULT_RULES.archives_days, ge=0, allow_inf_nan=False)
    """Days after its last upload after which a code archive that no job names is deleted."""
    retain_packages_days: float = Field(DEFAULT_RULES.packages_days, ge=0, allow_inf_nan=False)
    """Days after their last use after which packages of `code.pip` that no worker uses are deleted from a node."""
    retain_audit_days: float = Field(DEFAULT_RULES.audit_days, ge=0, allow_inf_nan=False)
    """Days for which the audit is kept; at least 30. 0: for ever. What is deleted leaves a record in the audit."""
    gc_every_s: float = Field(DEFAULT_EVERY_S, ge=0, allow_inf_nan=False)
    """Seconds between two rounds in which what is old is deleted. 0: only by `shoal gc`."""

    webhooks: tuple[ServiceWebhook, ...] = ()
    """Receivers of events of all jobs, as a JSON list of objects with name, url, events and secret. See
    docs/webhooks.md."""
    webhook_secrets_dir: Path = Field(default_factory=lambda given: _below_state(given, "webhook-secrets"))
    """Directory of the secrets that webhooks name as file:NAME. Default: webhook-secrets/ in state_dir."""

    webhook_receivers: str = ""
    """Hosts, addresses and networks that webhooks of specs may reach beside public addresses, separated by commas:
    hooks.internal, 10.2.0.0/16. A host that is named here may have any address."""
    webhook_project_secrets: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Which secrets the webhooks of specs may name, by project, as JSON: {"vision": ["file:vision"]}. The project * is
    every project, and the secret * every secret. By default none."""

    @property
    def webhook_rules(self) -> WebhookRules:
        return WebhookRules.read(self.webhook_receivers, self.webhook_project_secrets)

    @property
    def host_names(self) -> frozenset[str]:
        """`allowed_hosts`, in lower case."""
        return frozenset(name.strip().lower() for name in self.allowed_hosts.split(",") if name.strip())

    @property
    def retention(self) -> RetentionRules:
        return RetentionRules(
            logs_days=self.retain_logs_days,
            checkpoints_days=self.retain_checkpoints_days,
            series_days=self.retain_series_days,
            events_days=self.retain_events_days,
            jobs_days=self.retain_jobs_days,
            archives_days=self.retain_archives_days,
            packages_days=self.retain_packages_days,
            audit_days=self.retain_audit_days,
        )

    @property
    def logs(self) -> LogSettings:
        return LogSettings(level=self.log_level, format=self.log_format)

    @property
    def allowed_places(self) -> AllowedPlaces:
        """Places that specs may name. Each root is in it as given and with its links resolved."""
        paths = [path.strip() for path in self.allowed_paths.split(",") if path.strip()]
        protocols = frozenset(
            protocol.strip().lower() for protocol in self.allowed_protocols.split(",") if protocol.strip()
        )
        checkpoints = self.checkpoint_url.removeprefix("file://")
        return AllowedPlaces(
            paths=tuple(dict.fromkeys(place for path in paths for place in (path, os.path.realpath(path)))),
            protocols=protocols,
            pip=self.allow_pip,
            closed=tuple({str(self.state_dir), os.path.realpath(self.state_dir)}),
            opened=tuple({checkpoints, os.path.realpath(checkpoints)}) if "://" not in checkpoints else (),
        )

    @field_validator("allowed_paths")
    @classmethod
    def _are_absolute(cls, paths: str) -> str:
        if wrong := [path for path in paths.split(",") if path.strip() and not path.strip().startswith("/")]:
            raise ValueError(f"{', '.join(wrong)}: give absolute directories, separated by commas.")
        return paths

    @field_validator("trusted_proxies")
    @classmethod
    def _are_addresses(cls, proxies: str) -> str:
        for address in proxies.split(",") if proxies.strip() not in ("", "*") else ():
            try:
                ipaddress.ip_network(address.strip())
            except ValueError as error:
                raise ValueError(f"give addresses or networks, not names, separated by commas: {error}.") from None
        return proxies.strip()

    @field_validator("retain_audit_days")
    @classmethod
    def _keeps_the_audit(cls, days: float) -> float:
        if 0 < days < LEAST_AUDIT_DAYS:
            raise ValueError(f"the audit is kept for {LEAST_AUDIT_DAYS:g} days at least; 0 keeps it for ever.")
        return days

    @field_validator("max_probation")
    @classmethod
    def _is_limit(cls, limit: str) -> str:
        probation_limit(limit, 1)
        return limit

    @field_validator("webhooks")
    @classmethod
    def _have_known_events(cls, hooks: tuple[ServiceWebhook, ...]) -> tuple[ServiceWebhook, ...]:
        names = [hook.name for hook in hooks]
        if len(set(names)) < len(names):
            raise ValueError("two webhooks have the same name.")
        for hook in hooks:
            if unknown := unknown_patterns(hook.events):
                raise ValueError(f"webhook {hook.name}: no event has the type {', '.join(unknown)}.")
        return hooks

    @field_validator("webhook_receivers")
    @classmethod
    def _are_receivers(cls, receivers: str) -> str:
        WebhookRules.read(receivers, {})
        return receivers

    @field_validator("webhook_project_secrets")
    @classmethod
    def _are_references(cls, secrets: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        for project, references in secrets.items():
            for reference in references:
                if reference != ANY and not is_reference(reference):
                    raise ValueError(f"{project}: {reference!r} is not file:NAME, env:{SECRET_VARIABLE}NAME or {ANY}.")
        return secrets

    @field_validator("state_dir", "webhook_secrets_dir", "isolate_dir")
    @classmethod
    def _make_absolute(cls, path: Path) -> Path:
        return path.expanduser().absolute()

    @field_validator("checkpoint_url")
    @classmethod
    def _make_absolute_url(cls, url: str) -> str:
        """Make the URL independent of the working directory, which is another one in workers."""
        return absolute(url, Path.cwd())

    @field_validator("cluster")
    @classmethod
    def _is_name(cls, name: str) -> str:
        if name and not re.fullmatch(CLUSTER_PATTERN, name):
            raise ValueError("a cluster's name has lower-case letters, digits and hyphens, at most 63, as in east-1.")
        return name

    @model_validator(mode="after")
    def _tokens_are_encrypted(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError(f"tls_cert {self.tls_cert} and tls_key {self.tls_key}: give both, or neither.")
        for name, path in (("tls_cert", self.tls_cert), ("tls_key", self.tls_key)):
            if path is not None and not path.is_file():
                raise ValueError(f"{name} {path}: there is no such file.")
        if self.tls_cert is None and not self.allow_plain_http and not is_loopback(self.host):
            raise ValueError(
                f"host {self.host!r} is beyond loopback, where tokens would travel without encryption. Give tls_cert "
                "and tls_key (--tls-cert, --tls-key), or set allow_plain_http (--allow-plain-http, "
                "SHOAL_ALLOW_PLAIN_HTTP=true) if a proxy or the network encrypts."
            )
        return self

    @model_validator(mode="after")
    def _issuer_is_whole(self) -> Self:
        if not self.oidc_issuer:
            return self
        parts = urlsplit(self.oidc_issuer)
        if parts.scheme != "https" and not (parts.scheme == "http" and is_loopback(parts.hostname or "")):
            raise ValueError(f"oidc_issuer {self.oidc_issuer!r} is not an https URL.")
        if not self.oidc_audience or not self.oidc_roles:
            raise ValueError(
                f"oidc_issuer {self.oidc_issuer!r} needs oidc_audience (SHOAL_OIDC_AUDIENCE) and oidc_roles "
                "(SHOAL_OIDC_ROLES): without them nobody, or everybody of the issuer, would be let in."
            )
        return self

    @model_validator(mode="after")
    def _isolates_its_own_cluster(self) -> Self:
        if self.isolate and (self.cluster or self.ray_address is not None):
            raise ValueError(
                f"isolate is about the cluster that the server starts, and cluster {self.cluster!r} or ray_address "
                f"{self.ray_address!r} names another one: start that one with another user than the server, and leave "
                "isolate out."
            )
        return self

    @model_validator(mode="after")
    def _one_cluster(self) -> Self:
        if self.cluster and (self.ray_address is not None or self.num_cpus is not None or self.nodes != 1):
            raise ValueError(
                f"cluster {self.cluster!r} joins with `shoal join`; ray_address, num_cpus and nodes describe one for "
                "which the server starts a gateway. Give one or the other."
            )
        if self.cluster_token_file is not None and not self.cluster:
            raise ValueError(
                f"cluster_token_file {self.cluster_token_file} has the token of a cluster that joins: name that "
                "cluster with cluster (--cluster, SHOAL_CLUSTER)."
            )
        if self.ray_address is not None and (self.num_cpus is not None or self.num_gpus or self.nodes != 1):
            raise ValueError(
                f"ray_address {self.ray_address!r} joins a cluster; num_cpus, num_gpus and nodes describe the one "
                "that is started without it. Give one or the other."
            )
        return self


def is_loopback(host: str) -> bool:
    """Return True if only programs of this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def load_settings(**given: object) -> Settings:
    """Read the settings from arguments, the environment and files. Raises SettingsError."""
    secrets = os.environ.get(SECRETS_DIR) or None
    if secrets is not None and not Path(secrets).is_dir():
        raise SettingsError(
            f"{SECRETS_DIR} {secrets!r} is not a directory. It holds files that are named like settings."
        )
    try:
        return Settings(_secrets_dir=secrets, **given)  # type: ignore[arg-type]
    except ValidationError as error:
        lines = []
        for detail in error.errors(include_url=False):
            name = ".".join(str(part) for part in detail["loc"])
            prefix = f"{name} {detail['input']!r}: " if name else ""
            lines.append(prefix + str(detail["msg"]).removeprefix("Value error, "))
        raise SettingsError(
            "\n".join(lines)
            + f"\nSettings come from options, from the environment (SHOAL_<NAME>) and from files in {SECRETS_DIR}."
        ) from error


def take_webhook_secrets() -> dict[str, str]:
    """Remove the secrets of webhooks from the environment, and return them by variable."""
    # workers run code of users, and must not inherit the secrets
    names = [name for name in os.environ if name.startswith(SECRET_VARIABLE)]
    return {name: os.environ.pop(name) for name in names}


def _jobs_directory(given: dict[str, Any]) -> Path:
    """Return the directory in which jobs write by default. `given`: see `_below_state`."""
    directory: Path = given.get("isolate_dir", Path()) if given.get("isolate") else given.get("state_dir", Path())
    return directory


def _below_state(given: dict[str, Any], name: str) -> Path:
    """Return a path below state_dir. `given`: the fields that are valid so far, perhaps without state_dir."""
    state_dir: Path = given.get("state_dir", Path())  # if it is invalid, the result is not used
    return state_dir / name
