"""Every setting, option, port and path that the files of deploy/ and the installation page use exists in the code."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from ray.dashboard.http_server_agent import PUBLIC_EXACT_PATHS
from ray.scripts.scripts import start

from kit.requirements import require
from shoal_api.cli.main import build_app
from shoal_service.settings import SECRETS_DIR, Settings

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"
_PORT = Settings.model_fields["port"].default
_RAY_HEALTH_PORT = 52365
_OF_OTHERS = {"SHOAL_VERSION", "SHOAL_URL", "SHOAL_TOKEN", "SHOAL_CA_FILE", "SHOAL_WEBHOOK_SECRET"}
"""The tag of the images in compose.yaml; what the command line reads."""
FILES = sorted(
    path
    for path in [*DEPLOY.rglob("*"), ROOT / "docs" / "install.md"]
    if path.is_file() and path.suffix not in (".json", ".txt") and "secrets" not in path.parts
)


def test_every_setting_exists() -> None:
    known = {f"SHOAL_{name.upper()}" for name in Settings.model_fields} | {SECRETS_DIR} | _OF_OTHERS
    used = {file.name: set(re.findall(r"\bSHOAL_[A-Z][A-Z_]+\b", file.read_text("utf-8"))) for file in FILES}
    assert {file: names - known for file, names in used.items() if names - known} == {}


def test_every_option_of_ray_start_exists() -> None:
    known = {option for parameter in start.params for option in parameter.opts}
    unknown = {file.name: options for file in FILES if (options := _options_of_ray_start(file) - known)}
    assert unknown == {}


def _options_of_ray_start(file: Path) -> set[str]:
    text = file.read_text("utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if re.search(r"\bray start\b|\[start,|RAY_NODE_OPTIONS=", line)]
    return {option for line in lines for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", line.replace("--unset", ""))}


def test_the_parameters_of_the_ray_cluster_are_options_of_ray_start(manifests: list[dict[str, Any]]) -> None:
    [spec] = [one["spec"] for one in manifests if one["kind"] == "RayCluster"]
    known = {option.removeprefix("--") for parameter in start.params for option in parameter.opts}
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        assert group["rayStartParams"].keys() <= known


def test_every_command_of_shoal_and_its_options_exist() -> None:
    commands = typer.main.get_command(build_app())
    assert isinstance(commands, typer.core.TyperGroup)
    found = 0
    for file in FILES:
        text = file.read_text("utf-8").replace("\\\n", " ")
        for name, rest in re.findall(
            r"(?:^|[/ `=])shoal ((?:serve|join|drain|nodes|doctor|submit|demo|login|backup|restore))\b([^`\n#]*)", text
        ):
            found += 1
            _, command, _ = commands.resolve_command(typer.Context(commands), [name])
            options = {option for parameter in command.params for option in parameter.opts}
            assert set(re.findall(r"(?<![\w-])--[a-z-]+", rest)) <= options, f"{file.name}: shoal {name}{rest}"
    assert found > 5


def _probes(pods: dict[str, dict[str, Any]]) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    return [
        (name, container, container[kind]["httpGet"])
        for name, spec in pods.items()
        for container in spec["containers"]
        for kind in ("startupProbe", "livenessProbe", "readinessProbe")
        if kind in container
    ]


def test_probes_ask_for_routes_that_exist(pods: dict[str, dict[str, Any]], routes: set[str]) -> None:
    probes = _probes(pods)
    assert len(probes) >= 9
    for name, container, get in probes:
        if name == "shoal":
            ports = {port["name"]: port["containerPort"] for port in container["ports"]}
            assert ports[get["port"]] == _PORT and get["path"] in routes
        else:
            assert get["port"] == _RAY_HEALTH_PORT and get["path"] in PUBLIC_EXACT_PATHS


def test_addresses_in_health_checks_exist(routes: set[str]) -> None:
    texts = [(DEPLOY / "Dockerfile").read_text("utf-8"), (DEPLOY / "docker" / "gateway.sh").read_text("utf-8")]
    addresses = re.findall(r"http://127\.0\.0\.1:(\d+)(/[\w/]+)", "".join(texts))
    assert len(addresses) == 3
    for port, path in addresses:
        assert (int(port) == _PORT and path in routes) or (int(port) == _RAY_HEALTH_PORT and path in PUBLIC_EXACT_PATHS)


def test_prometheus_scrapes_a_path_and_a_port_that_exist(routes: set[str]) -> None:
    for file in (DEPLOY / "prometheus" / "prometheus.yml", DEPLOY / "compose" / "prometheus.yml"):
        [job] = yaml.safe_load(file.read_text("utf-8"))["scrape_configs"]
        assert job["metrics_path"] in routes
        assert all(target.endswith(f":{_PORT}") for target in job["static_configs"][0]["targets"])


def test_services_listen_on_the_default_port(compose: dict[str, Any], manifests: list[dict[str, Any]]) -> None:
    assert compose["services"]["shoal"]["environment"]["SHOAL_PORT"] == str(_PORT)
    [settings] = [one["data"] for one in manifests if one["metadata"]["name"] == "shoal-settings"]
    assert settings["SHOAL_PORT"] == str(_PORT)
    Settings(**{name.removeprefix("SHOAL_").lower(): value for name, value in settings.items() if name != SECRETS_DIR})


def test_the_units_are_valid(tmp_path: Path) -> None:
    for unit in (DEPLOY / "systemd").glob("*.service"):
        text = re.sub(r"/opt/shoal/bin/(?:shoal|ray)\b", shutil.which("true") or "", unit.read_text("utf-8"))
        copy = tmp_path / unit.name
        copy.write_text(text, encoding="utf-8")
        analyze = require("systemd", "systemd-analyze")
        done = subprocess.run([analyze, "verify", copy], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")


def _unit(name: str) -> dict[str, str]:
    lines = (DEPLOY / "systemd" / f"{name}.service").read_text("utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


def test_every_ray_unit_has_its_sessions_in_a_directory_of_its_own_and_removes_old_ones() -> None:
    """A node without --temp-dir takes the head's path, where it may not write; and the server writes its node's."""
    for name in ("shoal-ray-head", "shoal-ray-node"):
        unit = _unit(name)
        [sessions] = re.findall(r"--temp-dir=(\S+)", unit["ExecStart"])
        own = f"/var/lib/{unit['StateDirectory'].split()[0]}"
        assert sessions == f"{own}/tmp" and f"cd {own} &&" in unit["ExecStartPre"]
        # A path of a socket has 107 characters at most.
        assert len(f"{sessions}/session_2030-12-31_23-59-59_999999_4194304/sockets/plasma_store") <= 107
        assert f"-{own}" in _unit("shoal-gateway")["ReadWritePaths"].split()
    assert f"-{Path(sessions).parent}" in _unit("shoal")["ReadWritePaths"].split()


def test_the_gateway_reads_nothing_of_a_control_plane_on_its_machine() -> None:
    server, gateway = _unit("shoal"), _unit("shoal-gateway")
    closed = gateway["InaccessiblePaths"].split()
    assert f"-/var/lib/{server['StateDirectory']}" in closed
    assert "-/etc/shoal/secrets/shoal_database_url" in closed and "-/etc/shoal/shoal.env" in closed
    page = (ROOT / "docs" / "install.md").read_text("utf-8")
    [token] = re.findall(r"--token-file=(\S+)", gateway["ExecStart"])
    assert f"SHOAL_CLUSTER_TOKEN_FILE={token}" in page


@pytest.mark.parametrize("name", ["shoal-ray-head", "shoal-ray-node"])
def test_a_ray_unit_keeps_the_session_before(name: str, tmp_path: Path) -> None:
    [script] = re.findall(r"^/bin/sh -c '(.*)'$", _unit(name)["ExecStartPre"])
    script = re.sub(r"/var/lib/[\w-]+", str(tmp_path), script)
    for number in range(3):
        subprocess.run(["sh", "-c", script], check=True)
        (tmp_path / "tmp" / f"session_{number}").mkdir(parents=True)
    assert sorted(path.name for path in tmp_path.rglob("session_*")) == ["session_1", "session_2"]


def test_the_units_leave_a_drain_its_time() -> None:
    node = (DEPLOY / "systemd" / "shoal-ray-node.service").read_text("utf-8")
    [drain_s] = re.findall(r"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=(\d+)", node)
    [stop_s] = re.findall(r"^TimeoutStopSec=(\d+)$", node, re.M)
    assert int(drain_s) < int(stop_s)
    server = (DEPLOY / "systemd" / "shoal.service").read_text("utf-8")
    [stop_s] = re.findall(r"^TimeoutStopSec=(\d+)$", server, re.M)
    assert Settings.model_fields["stop_s"].default < int(stop_s)
