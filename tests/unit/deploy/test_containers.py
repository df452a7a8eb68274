"""The Dockerfile and the compose file pass their validators, and name only what exists."""

import re
import subprocess
import tomllib
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

import control_plane_requirements
from shoal_service.cluster.ray_environment import CLUSTER_ENVIRONMENT
from shoal_service.core.access import parse_token_id

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text("utf-8")
SCRIPTS = sorted([*DEPLOY.glob("docker/*.sh"), DEPLOY / "compose" / "secrets.sh"])


def test_the_dockerfile_has_no_findings(run_program: Callable[..., None]) -> None:
    run_program("hadolint", "--failure-threshold", "style", str(DEPLOY / "Dockerfile"))


def test_the_compose_file_follows_its_schema(run_program: Callable[..., None]) -> None:
    run_program("check-jsonschema", "--builtin-schema", "vendor.compose-spec", str(DEPLOY / "compose" / "compose.yaml"))


def test_what_the_dockerfile_copies_exists_and_is_not_ignored() -> None:
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text("utf-8").split()
    assert ignored[0] == "*"
    sent = [line[1:] for line in ignored if line.startswith("!")]
    lines = re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.M)
    sources = [word for line in lines for word in line.split()[:-1] if not word.startswith("--")]
    assert sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert any(source == name or fnmatch(source, f"{name}/*") for name in sent), (
            f"{source} is not sent to the build"
        )
    assert all((ROOT / name).exists() for name in sent)


def test_what_the_wheel_has_beside_its_packages_exists_and_is_in_the_build_of_the_image() -> None:
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert {"constraints.txt", "examples", "deploy/systemd", "deploy/ray.env"} <= wheel["shared-data"].keys()
    for source in wheel["shared-data"]:
        assert (ROOT / source).exists(), source
        assert re.search(rf"^COPY {re.escape(source)} ", DOCKERFILE, re.M), source
        assert not Path("deploy/compose/secrets").is_relative_to(source), source


def test_images_run_as_a_user_who_is_not_root_and_have_a_health_check() -> None:
    stages = dict(re.findall(r"^FROM \S+ AS (\S+)\n(.*?)(?=^FROM |\Z)", DOCKERFILE, re.M | re.S))
    for target, user in (("control-plane", 10001), ("worker", 10002)):
        assert re.search(rf"^USER {user}:10001$", stages[target], re.M)
        assert "HEALTHCHECK" in stages[target]


def test_torch_is_the_release_that_the_package_requires() -> None:
    constraints = (ROOT / "constraints.txt").read_text("utf-8")
    [release] = re.findall(r"^torch==(\d+\.\d+)\.", constraints, re.M)
    assert set(re.findall(r"torch==(\d+\.\d+)\.", DOCKERFILE)) == {release}


def test_no_file_asks_for_a_build_that_pips_usual_index_lacks() -> None:
    """It has no version with a local part, such as 2.13.0+cpu."""
    for file in (*DEPLOY.rglob("*"), ROOT / "pyproject.toml", ROOT / "constraints.txt", ROOT / "docs" / "install.md"):
        if file.is_file() and "secrets" not in file.parts:
            assert not re.search(r"==\s*[\w.]+\+\w", file.read_text("utf-8")), file


def test_the_image_of_workers_has_the_compiler_that_torch_compile_needs() -> None:
    stages = dict(re.findall(r"^FROM \S+ AS (\S+)\n(.*?)(?=^FROM |\Z)", DOCKERFILE, re.M | re.S))
    assert re.search(r"apt-get install .*\bg\+\+", stages["worker"])


def test_the_packages_of_the_control_plane_are_up_to_date_and_neither_ray_nor_torch_is_one() -> None:
    assert control_plane_requirements.PAGE.read_text("utf-8") == control_plane_requirements.text(), "run `make docs`"
    assert not {"ray", "grpcio", "torch", "transformers", "pandas"} & control_plane_requirements.closure()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_scripts_can_be_parsed(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)


def test_the_secrets_are_written_once(tmp_path: Path) -> None:
    script = tmp_path / "secrets.sh"
    script.write_bytes((DEPLOY / "compose" / "secrets.sh").read_bytes())
    written = []
    for _ in range(2):
        subprocess.run(["sh", script], check=True, capture_output=True)
        written.append({path.name: path.read_text() for path in (tmp_path / "secrets").iterdir()})
    assert written[0] == written[1]
    assert written[0]["postgres_password"] in written[0]["shoal_database_url"]
    assert parse_token_id(written[0]["cluster_token"]), "the server takes it as a token"
    assert (tmp_path / "secrets").stat().st_mode & 0o777 == 0o700


def test_services_use_secrets_volumes_and_networks_that_are_declared(compose: dict[str, Any]) -> None:
    written = set(re.findall(r"^keep (\w+)", (DEPLOY / "compose" / "secrets.sh").read_text("utf-8"), re.M))
    assert compose["secrets"].keys() == written
    targets = set(re.findall(r"^FROM \S+ AS (\S+)$", DOCKERFILE, re.M))
    arguments = set(re.findall(r"^ARG (\w+)", DOCKERFILE, re.M))
    for service in compose["services"].values():
        assert set(service.get("secrets", ())) <= compose["secrets"].keys()
        beside = service.get("network_mode", "").removeprefix("service:")
        assert beside in compose["services"] or set(service["networks"]) <= compose["networks"].keys()
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            exists = (DEPLOY / "compose" / source).exists() if source.startswith(".") else source in compose["volumes"]
            assert exists, source
        if "build" in service:
            assert service["build"]["target"] in targets
            assert set(service["build"].get("args", ())) <= arguments
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
        for name in service.get("depends_on", ()):
            has_check = "healthcheck" in compose["services"][name] or "build" in compose["services"][name]
            assert has_check, f"{name} is waited for and has no health check"


def test_sessions_of_the_ray_head_are_on_no_volume_and_its_tables_are(compose: dict[str, Any]) -> None:
    head = compose["services"]["ray-head"]
    [sessions] = [part.removeprefix("--temp-dir=") for part in head["command"] if part.startswith("--temp-dir=")]
    kept = [Path(volume.split(":")[1]) for volume in head["volumes"]]
    assert not any(Path(sessions).is_relative_to(path) for path in kept)
    [tables] = [path for path in kept if Path(head["environment"]["RAY_gcs_storage_path"]).is_relative_to(path)]
    assert re.search(rf"install -d .*-o shoal-ray .*{tables}\b", DOCKERFILE), (
        "a new volume takes its owner from the image"
    )


def test_no_secret_is_in_the_environment_of_a_service(compose: dict[str, Any]) -> None:
    variables = {
        name: value for one in compose["services"].values() for name, value in one.get("environment", {}).items()
    }
    secret = {name: value for name, value in variables.items() if re.search("PASSWORD|TOKEN|SECRET|DATABASE_URL", name)}
    assert all("/run/secrets" in value or name == "RAY_AUTH_MODE" for name, value in secret.items()), secret


def test_the_gateway_joins_as_the_cluster_of_the_server_with_its_token(compose: dict[str, Any]) -> None:
    gateway, server = compose["services"]["gateway"], compose["services"]["shoal"]["environment"]
    url, *options = gateway["command"]
    port = server["SHOAL_PORT"]
    assert url == gateway["environment"]["SHOAL_HOME_URL"] == f"http://shoal:{port}"
    assert options == [f"--name={server['SHOAL_CLUSTER']}", f"--token-file={server['SHOAL_CLUSTER_TOKEN_FILE']}"]
    assert "shoal" in server["SHOAL_ALLOWED_HOSTS"].split(",")
    for name, script in (("gateway", "gateway.sh"), ("gateway-node", "gateway-node.sh")):
        [program] = compose["services"][name]["entrypoint"]
        assert re.search(rf"^COPY .*deploy/docker/{script} /usr/local/bin/{program}$", DOCKERFILE, re.M)


def test_ray_nodes_end_within_the_time_that_a_drain_may_take(compose: dict[str, Any]) -> None:
    node = compose["services"]["ray-node"]
    drain_s = int(node["environment"]["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
    assert drain_s < int(node["stop_grace_period"].removesuffix("s"))


def test_prometheus_and_grafana_differ_from_the_bare_ones_in_the_addresses_only() -> None:
    for own, bare in (
        ("prometheus.yml", "prometheus/prometheus.yml"),
        ("datasource.yml", "grafana/provisioning/datasources/prometheus.yml"),
    ):
        text = (DEPLOY / "compose" / own).read_text("utf-8")
        renamed = text.replace("shoal:8470", "127.0.0.1:8470").replace("http://prometheus:", "http://127.0.0.1:")
        renamed = renamed.replace("/run/secrets/prometheus_token", "/etc/prometheus/shoal-token")
        assert yaml.safe_load(renamed) == yaml.safe_load((DEPLOY / bare).read_text("utf-8"))


def test_the_file_of_rays_settings_is_read_by_all_ray_nodes(compose: dict[str, Any]) -> None:
    for name in ("ray-head", "ray-node", "gateway-node", "gateway"):
        assert compose["services"][name]["env_file"] == ["../ray.env"]
    assert CLUSTER_ENVIRONMENT  # compared with deploy/ray.env in tests/unit/service/cluster
