"""The composition root of the control plane: store, control loop, HTTP edge, and a Ray cluster if none was given.

HTTP requests are answered from the start; the cluster starts in the background, and /readyz reports when it is ready.
An embedded cluster and its gateway are child processes. This process makes no Ray calls: the gateway dials in, as
that of any other cluster does. Nothing is decided here.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from shoal_api.home_address import find_home, find_local_address, format_netloc
from shoal_api.http.access.limits import Limits
from shoal_api.http.app import create_app
from shoal_api.http.serving import ConnectionLimits, HttpConfig, make_server
from shoal_api.stopping import SavingProgress, StopRequest
from shoal_service.clock import SystemClock, wait_for_any
from shoal_service.cluster import hardware
from shoal_service.cluster.embedded_cluster import EmbeddedCluster
from shoal_service.cluster.isolation import Isolation, IsolationConfig, isolate
from shoal_service.cluster.ray_environment import CLUSTER_ENVIRONMENT, inherit_environment
from shoal_service.clusters.wire import DEFAULT_CLUSTER, GatewayConfig
from shoal_service.collector import OF_CONTROL_PLANE, collect_rarely
from shoal_service.control.config import ControlConfig
from shoal_service.control.control_loop import ControlLoop
from shoal_service.control.gateway_process import GatewayProcess
from shoal_service.control.job_storage import JobStorage
from shoal_service.control.joined_clusters import JoinedClusters
from shoal_service.control.oidc import Issuer, IssuerConfig
from shoal_service.control.ownership import own_name
from shoal_service.control.planning import load_profiles, planning_profile
from shoal_service.control.retention import RetentionCollector, RetentionConfig
from shoal_service.control.token_files import (
    ensure_admin_token,
    ensure_cluster_token,
    register_cluster_token,
)
from shoal_service.control.webhooks import MISSING, Secrets, WebhookConfig, WebhookDelivery, is_installed
from shoal_service.core.access import ClaimRules
from shoal_service.core.node_restarts import FIRST_PAUSE_S, LONGEST_PAUSE_S
from shoal_service.core.quantities import count_text
from shoal_service.core.retention import Kind
from shoal_service.process_memory import hide_process
from shoal_service.settings import SECRETS_DIR, Settings, is_loopback, take_webhook_secrets
from shoal_service.state_lock import StateLock
from shoal_service.store import Store, StoreUnavailable, cluster_links
from shoal_service.telemetry.exposition import Exposition, Sources
from shoal_service.telemetry.tallies import Count, PassTimes, RequestMetrics, WaitTallies, WebhookTallies
from shoal_workers.contract.log_settings import LogLevel
from shoal_workers.logs import set_up_logs
from shoal_workers.snapshot_store.slots.registry import remove_attempts
from shoal_workers.version import VERSION

_STOP_S = 15.0
"""Seconds for which a stop waits for the parts of the server to end."""
_THREADS = 32
"""Threads for calls that block: of the store, and orders to the cluster."""
_HEAL_S = 1.0
"""Seconds between two checks of the embedded cluster for dead processes."""
_EXPOSURE = (
    "Job code runs as this server's user. It can read {state_dir}, with the database, admin-token and the "
    "secrets of webhooks. For people who trust each other; shoal serve --isolate runs it as another user."
)
_NO_PROXIES = (
    "allow_plain_http is set and trusted_proxies (SHOAL_TRUSTED_PROXIES) is empty: behind a proxy, cookies are not "
    "Secure, and the audit and the limits see the proxy's address. Name the proxy's addresses or networks."
)
_HOME_URL_IGNORED = (
    "home_url {url} (SHOAL_HOME_URL) is ignored, because the cluster joins: its gateway tells supervisors the address "
    "of the service. Give it there: shoal join --home-url, or SHOAL_HOME_URL of that process."
)
_log = logging.getLogger(__name__)


def run_server(settings: Settings) -> None:
    """Serve until SIGINT or SIGTERM; see `stopping.py`.

    Prints one line `listening on URL` to stderr once requests are accepted.

    Raises:
        StateDirectoryInUse
        SettingsError: the settings do not fit this machine.
    """
    set_up_logs(settings.logs)
    if settings.log_level is not LogLevel.DEBUG:
        logging.getLogger("alembic").setLevel(logging.WARNING)
        logging.getLogger("httpx").setLevel(logging.WARNING)  # its lines have the URLs of webhooks
    hide_process()
    asyncio.run(_serve(settings, StateLock.take_for_process(settings.state_dir)))


async def _serve(settings: Settings, lock: StateLock) -> None:
    """Make the parts of the server, run them, and end them after a stop."""
    secrets = Secrets(take_webhook_secrets(), settings.webhook_secrets_dir)  # before processes inherit the environment
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_THREADS, thread_name_prefix="work"))
    local = await asyncio.to_thread(_make_local_cluster, settings)
    store = await asyncio.to_thread(Store.open, settings.database_url)
    ensure_admin_token(store, settings.state_dir, now=time.time())
    if settings.cluster_token_file is not None:
        register_cluster_token(store, settings.cluster_token_file, settings.cluster, now=time.time())
    plane = _make_control_plane(settings, store, local, secrets)
    _warn_of_settings(settings)
    progress = SavingProgress(store, _say, time.monotonic)
    stop = StopRequest(
        saves=local.ends_with_server and settings.stop_s > 0,
        begin=lambda: plane.control.save_and_end(progress.show) if local.ends_with_server else None,
    )
    # before anything is started, so that a port that is in use fails early
    with _listen(settings.host, settings.port) as listener:
        host, port = listener.getsockname()[:2]
        http_config = HttpConfig(
            settings.tls_cert, settings.tls_key, settings.trusted_proxies, _connection_limits(settings)
        )
        log_requests = settings.log_level is LogLevel.DEBUG
        server = make_server(plane.app, http=http_config, host=host, port=port, log_requests=log_requests)
        _stop_on_signals(server, stop)
        gateway = None if settings.cluster else _make_gateway(settings, store, plane.clusters, local, (host, port))
        running = asyncio.create_task(_run_jobs(settings, plane, local, gateway, stop))
        background = [
            running,
            asyncio.create_task(plane.delivery.run(stop.now)),
            asyncio.create_task(plane.retention.run(stop.now, lambda: plane.control.lease)),
            asyncio.create_task(_stop(server, stop, running, settings.stop_s)),
        ]
        lock.listens_at(f"http://{format_netloc(host, port)}")
        collect_rarely(OF_CONTROL_PLANE)
        _say(f"listening on {http_config.scheme}://{format_netloc(host, port)}")
        try:
            await server.serve(sockets=[listener])
        finally:
            stop.signal()
            stop.now.set()
            await asyncio.wait(background, timeout=_STOP_S)
            if local.ends_with_server:
                progress.close([job_id for job_id, _ in plane.control.given_up])
            await _end(plane, local, gateway)
            store.close()
            if not running.done():
                os._exit(0)  # a thread still waits for the cluster, and would keep the process


@dataclass(frozen=True, slots=True)
class _LocalCluster:
    """The Ray cluster that the server starts on this machine, if it starts one."""

    embedded: EmbeddedCluster | None
    isolation: Isolation | None
    """The users that isolate job code; None if it runs as the server's user."""
    ends_with_server: bool

    @property
    def is_exposed(self) -> bool:
        """True if job code can read what the server can read."""
        return self.embedded is not None and self.isolation is None


def _make_local_cluster(settings: Settings) -> _LocalCluster:
    """Prepare the embedded cluster, and say as whom job code runs. Raises SettingsError."""
    isolation = _isolate(settings) if settings.isolate else None
    embedded = None if settings.ray_address or settings.cluster else _make_embedded(settings, isolation)
    local = _LocalCluster(embedded, isolation, ends_with_server=embedded is not None and not settings.keep_cluster)
    if isolation is not None:
        workers, gateway = isolation.workers, isolation.gateway
        _say(f"isolate: code of jobs runs as user {workers.name} ({workers.home}), the gateway as {gateway.name}")
    elif local.is_exposed:
        _say(_EXPOSURE.format(state_dir=settings.state_dir))
    return local


def _warn_of_settings(settings: Settings) -> None:
    """Log the settings that are ignored, or incomplete."""
    if settings.cluster and settings.home_url:
        _log.warning("home.ignored", extra={"reason": _HOME_URL_IGNORED.format(url=settings.home_url)})
    if any(hook.is_apprise for hook in settings.webhooks) and not is_installed():
        _log.warning("webhooks.no_apprise", extra={"reason": MISSING})
    if settings.allow_plain_http and not is_loopback(settings.host) and not settings.trusted_proxies:
        _log.warning("http.no_trusted_proxies", extra={"reason": _NO_PROXIES})


@dataclass(frozen=True, slots=True)
class _ControlPlane:
    """The parts of the server, connected with each other and not started."""

    app: FastAPI
    clusters: JoinedClusters
    control: ControlLoop
    delivery: WebhookDelivery
    retention: RetentionCollector
    storage: JobStorage


def _make_control_plane(settings: Settings, store: Store, local: _LocalCluster, secrets: Secrets) -> _ControlPlane:
    clock, waits, requests, passes = SystemClock(), WaitTallies(), RequestMetrics(), PassTimes()
    profiles = load_profiles(settings.state_dir)
    config = ControlConfig(
        owner=own_name(),
        lease_ttl_s=settings.lease_ttl_s,
        checkpoint_url=settings.checkpoint_url,
        max_probation=settings.max_probation,
        profiles=tuple(profiles.values()),
        fork_workers=settings.fork_workers,
        agents_from=settings.agents_from,
        snapshot_scope=settings.snapshot_scope,
        rack_label=settings.rack_label,
        scale_out=settings.scale_out,
        logs=settings.logs,
    )
    clusters = JoinedClusters(store, settings.cluster or DEFAULT_CLUSTER, clock, lambda: control.lease, waits)
    control = ControlLoop(store, clusters, clock, config, times=passes)
    webhook_tallies = WebhookTallies((hook.name for hook in settings.webhooks), waits)
    hooks = WebhookConfig(secrets=secrets, rules=settings.webhook_rules, hooks=settings.webhooks)
    delivery = WebhookDelivery(store, clock, hooks, lease=lambda: control.lease, tallies=webhook_tallies)
    storage, removals = JobStorage(settings.checkpoint_url, waits), Count(Kind)
    rules = RetentionConfig(rules=settings.retention, every_s=settings.gc_every_s)
    retention = RetentionCollector(store, storage, clock, rules, removals, clusters)
    exposition = Exposition(
        Sources(
            store=store,
            owner=config.owner,
            removals=removals,
            waits=waits,
            requests=requests,
            passes=passes,
            webhooks=webhook_tallies,
            cluster=control.snapshot,
            profile_of=lambda spec: planning_profile(spec, config.profiles),
            state_dir=settings.state_dir,
        )
    )
    app = create_app(
        store=store,
        cluster=control,
        scrape=exposition.render,
        version=VERSION,
        checkpoint_url=settings.checkpoint_url,
        requests=requests,
        retention=retention,
        profiles=profiles,
        warnings=lambda: _describe_dead_nodes(local.embedded, settings),
        exposure=_EXPOSURE.format(state_dir=settings.state_dir) if local.is_exposed else "",
        grafana_url=settings.grafana_url,
        issuer=_make_issuer(settings, waits),
        limits=Limits(
            requests_per_s=settings.limit_requests,
            streams=settings.limit_streams,
            uploads=settings.limit_uploads,
            requests_at_once=settings.limit_at_once,
            body_bytes=settings.limit_body_bytes,
            archive_bytes=settings.limit_archive_bytes,
        ),
        places=settings.allowed_places,
        webhooks=settings.webhook_rules,
        allowed_hosts=settings.host_names | {socket.gethostname().lower()},
    )
    return _ControlPlane(app, clusters, control, delivery, retention, storage)


def _make_gateway(
    settings: Settings, store: Store, clusters: JoinedClusters, local: _LocalCluster, listens_at: tuple[str, int]
) -> GatewayProcess:
    """Make the gateway of the cluster that the server starts, or whose address it was given."""
    host, port = listens_at
    scheme = "http" if settings.tls_cert is None else "https"

    def configure() -> GatewayConfig:
        address = local.embedded.address if local.embedded is not None else settings.ray_address
        assert address
        return GatewayConfig(
            url=f"{scheme}://{format_netloc(find_local_address(host), port)}",
            token=ensure_cluster_token(store, settings.state_dir, clusters.own, now=time.time()),
            cluster=clusters.own,
            ca="" if settings.tls_cert is None else settings.tls_cert.read_text(encoding="ascii"),
            is_same_machine=True,
            ray_address=address,
            home=find_home(settings, host, port),
            replaces=True,  # a server that was started again may have another cluster under the same name
            ends_with_input=True,
            logs=settings.logs,
        )

    return GatewayProcess(
        configure,
        _ray_environment(local.embedded),
        lambda: store.reading(cluster_links.read_newest_report)(clusters.own),
        account=local.isolation.gateway if local.isolation is not None else None,
    )


async def _run_jobs(
    settings: Settings, plane: _ControlPlane, local: _LocalCluster, gateway: GatewayProcess | None, stop: StopRequest
) -> None:
    """Start the cluster and its gateway, then run the control loop until the stop."""
    healing = await _start_cluster(settings, local.embedded, stop.requested)
    background = [healing] if healing is not None else []
    if gateway is not None and not stop.requested.is_set():
        background.append(asyncio.create_task(gateway.run()))
    await _wait_until_joined(plane.clusters, stop.requested)
    if not stop.requested.is_set() or (local.embedded is not None and local.embedded.adopted):
        await plane.control.run(stop.now)
    for task in background:
        task.cancel()
    if gateway is not None:
        await asyncio.to_thread(gateway.stop)


async def _end(plane: _ControlPlane, local: _LocalCluster, gateway: GatewayProcess | None) -> None:
    """End the processes of the server, and what it has open besides the store."""
    if gateway is not None:
        await asyncio.to_thread(gateway.stop)
    await asyncio.to_thread(plane.clusters.close)
    if local.embedded is not None and local.ends_with_server:
        await asyncio.to_thread(local.embedded.stop)
        remove = local.isolation.remove_attempts if local.isolation is not None else remove_attempts
        remove(plane.control.given_up)
    plane.storage.close()


def _isolate(settings: Settings) -> Isolation:
    """Prepare the users that isolate job code. Raises SettingsError."""
    secrets: dict[str, str | Path | None] = {
        "tls_key": settings.tls_key,
        SECRETS_DIR: os.environ.get(SECRETS_DIR),
        "webhook_secrets_dir": settings.webhook_secrets_dir,
        "database_url": _database_file(settings),
    }
    url = settings.checkpoint_url.removeprefix("file://")
    config = IsolationConfig(
        user=settings.isolate_user,
        gateway_user=settings.isolate_gateway_user,
        home=settings.isolate_dir,
        state_dir=settings.state_dir,
        checkpoints=None if "://" in url else Path(url),
        secrets={name: Path(path) for name, path in secrets.items() if path},
    )
    return isolate(config)


def _database_file(settings: Settings) -> str:
    """Return the path of the database; empty if it is not a file."""
    scheme, _, path = settings.database_url.partition(":///")
    return path if scheme.startswith("sqlite") else ""


def _make_embedded(settings: Settings, isolation: Isolation | None) -> EmbeddedCluster:
    machine = hardware.find(os.environ)
    cpus = settings.num_cpus or machine.cpus
    gpus = machine.gpus if settings.num_gpus is None else settings.num_gpus
    hardware.require_cpus(settings.nodes, cpus, found=settings.num_cpus is None)
    _say(f"cluster: {count_text(settings.nodes, 'node')}, {count_text(cpus, 'CPU')}, {count_text(gpus, 'GPU')}")
    return EmbeddedCluster(
        Path(settings.state_dir),
        num_cpus=cpus,
        num_gpus=gpus,
        num_nodes=settings.nodes,
        leave_dead_nodes=settings.leave_dead_nodes,
        account=isolation.workers if isolation is not None else None,
        say=_say,
    )


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def _describe_dead_nodes(embedded: EmbeddedCluster | None, settings: Settings) -> tuple[str, ...]:
    dead_nodes = embedded.dead_nodes if embedded is not None else ()
    if not dead_nodes:
        return ()
    if settings.leave_dead_nodes:
        reason = "A node that died is not started again (--leave-dead-nodes)."
    else:
        reason = f"Each is started again after a pause, {FIRST_PAUSE_S:g} s at first and {LONGEST_PAUSE_S:g} s at most."
    return (f"Nodes of the embedded Ray cluster have stopped: {', '.join(dead_nodes)}. {reason}",)


def _make_issuer(settings: Settings, waits: WaitTallies) -> Issuer | None:
    if not settings.oidc_issuer:
        return None
    rules = ClaimRules(
        user_claim=settings.oidc_user_claim,
        role_claim=settings.oidc_role_claim,
        roles=settings.oidc_roles,
        projects_claim=settings.oidc_projects_claim,
    )
    config = IssuerConfig(issuer=settings.oidc_issuer, audience=settings.oidc_audience, rules=rules)
    return Issuer(config, waits=waits)


def _connection_limits(settings: Settings) -> ConnectionLimits:
    return ConnectionLimits(
        per_address=settings.limit_address_connections,
        total=settings.limit_connections,
        proxies=settings.trusted_proxies,
    )


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens. Raises SystemExit, with what to do."""
    # The protocol is named because asyncio disables Nagle's algorithm only then. With that algorithm every answer on a
    # kept-alive connection waits 40 ms for a delayed acknowledgement.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        unusable_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
        way_out = "Choose another with --port." if unusable_port else "Is --host an address of this machine?"
        raise SystemExit(f"cannot listen on {format_netloc(host, port)}: {error.strerror}. {way_out}") from error
    listener.listen(2048)
    return listener


def _stop_on_signals(server: uvicorn.Server, stop: StopRequest) -> None:
    """Let SIGINT and SIGTERM request a stop."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.signal)
    # uvicorn's handlers raise the signal a second time, which would interrupt the stop of the cluster
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]


def _ray_environment(embedded: EmbeddedCluster | None) -> dict[str, str]:
    """Return the environment of the gateway: with the token of the Ray cluster, and no setting of the server."""
    if embedded is not None:
        return {**inherit_environment(os.environ), **embedded.environment}
    return {**CLUSTER_ENVIRONMENT, **inherit_environment(os.environ, keep_ray_access=True)}


async def _start_cluster(
    settings: Settings, embedded: EmbeddedCluster | None, stop: asyncio.Event
) -> asyncio.Task[None] | None:
    """Start the embedded cluster, unless `stop` is set. Return the task that keeps it alive; None without a cluster."""
    while embedded is not None and not stop.is_set():
        try:
            _say("Ray: starting the cluster of this server; jobs are accepted and wait for it")
            await asyncio.to_thread(embedded.start)
            return asyncio.create_task(_keep_alive(embedded))
        except Exception:
            _log.exception("cluster.start_failed")
            await wait_for_any(SystemClock(), stop, timeout_s=5.0)
    if settings.ray_address is not None:
        _say(f"Ray: connecting to the cluster at {settings.ray_address}")
    elif settings.cluster:
        _say(f"Ray: waiting for the cluster {settings.cluster} to join (shoal join); jobs are accepted and wait for it")
    return None


async def _keep_alive(embedded: EmbeddedCluster) -> None:
    """Start dead processes of the embedded cluster again."""
    # polled, because the death of a process that an earlier server started is not signalled to this one
    while True:
        await asyncio.sleep(_HEAL_S)
        try:
            await asyncio.to_thread(embedded.heal)
        except Exception:
            _log.exception("embedded_cluster.heal_failed")


async def _wait_until_joined(clusters: JoinedClusters, stop: asyncio.Event) -> None:
    """Wait until a gateway has reported, or `stop` is set."""
    began_mono, loop, joined = time.monotonic(), asyncio.get_running_loop(), asyncio.Event()

    def changed(_: str) -> None:
        loop.call_soon_threadsafe(joined.set)

    def is_connected() -> bool:
        return any(entry.cluster.connected for entry in clusters.joined.values())

    unwatch = clusters.watch(changed)
    while not is_connected() and not stop.is_set():
        joined.clear()
        await wait_for_any(SystemClock(), joined, stop, timeout_s=1.0)
        with contextlib.suppress(StoreUnavailable):
            await asyncio.to_thread(clusters.refresh)
    unwatch()
    if is_connected():
        _say(f"Ray: connected after {time.monotonic() - began_mono:.1f} s; jobs can start")


async def _stop(server: uvicorn.Server, stop: StopRequest, running: asyncio.Task[None], saving_s: float) -> None:
    """Wait for a stop request, then at most `saving_s` until the jobs are saved, then end the server.

    Requests are answered until then, so that a user who watches a job sees its end.
    """
    await stop.requested.wait()
    if not stop.now.is_set():
        second_signal = asyncio.create_task(stop.now.wait())
        done, _ = await asyncio.wait([running, second_signal], timeout=saving_s, return_when=asyncio.FIRST_COMPLETED)
        second_signal.cancel()
        if not done:
            _say(f"Not saved within {saving_s:g} s (SHOAL_STOP_S): stopping now.")
        stop.now.set()
        await asyncio.wait([running], timeout=_STOP_S)
    server.should_exit = True
