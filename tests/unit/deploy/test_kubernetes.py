"""The manifests pass the schemas of Kubernetes and the field check of RayCluster, and their pods are restricted."""

import shutil
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import kubernetes_validate
import pytest
import yaml

from kit.deploy.ray_cluster_fields import mistakes
from shoal_service.cluster.ray_environment import CLUSTER_ENVIRONMENT
from shoal_service.control.token_files import ensure_admin_token
from shoal_service.core.access import ADMIN_TOKEN_FILE, new_token
from shoal_service.store import Store, access

FOLDER = Path(__file__).resolve().parents[3] / "deploy" / "kubernetes"
_VERSIONS = ("1.31", "1.37")
"""The oldest and the newest release that is tried."""


def _named(manifests: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    [found] = [one for one in manifests if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    return found


@pytest.mark.parametrize("version", _VERSIONS)
def test_the_manifests_follow_the_schemas(manifests: list[dict[str, Any]], version: str) -> None:
    for manifest in manifests:
        if manifest["kind"] != "RayCluster":
            kubernetes_validate.validate(manifest, version, strict=True)


def test_the_ray_cluster_has_only_fields_that_kuberay_knows(manifests: list[dict[str, Any]]) -> None:
    assert list(mistakes(_named(manifests, "RayCluster", "shoal"))) == []


def test_the_field_check_finds_mistakes(manifests: list[dict[str, Any]]) -> None:
    cluster = yaml.safe_load(yaml.safe_dump(_named(manifests, "RayCluster", "shoal")))
    spec = cluster["spec"]
    spec["autoscaler"] = {}
    spec["autoscalerOptions"]["version"] = "v3"
    spec["headGroupSpec"]["rayStartParams"]["num-cpus"] = 0
    del spec["workerGroupSpecs"][0]["template"]
    spec["workerGroupSpecs"][1]["maxReplicas"] = "8"
    assert list(mistakes(cluster)) == [
        ".spec.autoscalerOptions.version 'v3' is none of v1, v2",
        ".spec.headGroupSpec.rayStartParams.num-cpus 0 is not text",
        ".spec.workerGroupSpecs[0].template is missing",
        ".spec.workerGroupSpecs[1].maxReplicas '8' is not a int",
        ".spec.autoscaler is not a field of RayClusterSpec",
    ]


@pytest.mark.parametrize("version", _VERSIONS)
def test_the_pods_of_the_ray_cluster_follow_the_schema(pods: dict[str, dict[str, Any]], version: str) -> None:
    for name, spec in pods.items():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
        kubernetes_validate.validate(pod, version, strict=True)


def test_no_pod_is_root_or_may_become_it(pods: dict[str, dict[str, Any]]) -> None:
    for name, spec in pods.items():
        assert spec["securityContext"]["runAsNonRoot"], name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        for container in spec["containers"]:
            context = {key: value for key, value in container["securityContext"].items() if key != "runAsUser"}
            assert context == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def test_every_container_has_probes_and_resources_and_those_of_ray_shared_memory(
    pods: dict[str, dict[str, Any]],
) -> None:
    for name, spec in pods.items():
        memory = {one["name"] for one in spec["volumes"] if one.get("emptyDir", {}).get("medium") == "Memory"}
        for container in spec["containers"]:
            assert {"livenessProbe", "readinessProbe"} <= container.keys(), name
            assert "memory" in container["resources"]["limits"] and "cpu" in container["resources"]["requests"], name
            mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
            assert container["name"] in ("shoal", "gateway") or mounts["/dev/shm"] in memory, name
            assert set(mounts.values()) <= {volume["name"] for volume in spec["volumes"]}, name


def test_claims_config_maps_and_secrets_exist_or_are_in_the_installation_page(
    manifests: list[dict[str, Any]], pods: dict[str, dict[str, Any]]
) -> None:
    page = (FOLDER.parents[1] / "docs" / "install.md").read_text("utf-8")
    for spec in pods.values():
        for volume in spec["volumes"]:
            if claim := volume.get("persistentVolumeClaim"):
                _named(manifests, "PersistentVolumeClaim", claim["claimName"])
            if secret := volume.get("secret"):
                assert f"create secret generic {secret['secretName']}" in page
        for container in spec["containers"]:
            for source in container["envFrom"]:
                _named(manifests, "ConfigMap", source["configMapRef"]["name"])
    cluster = _named(manifests, "RayCluster", "shoal")
    assert f"create secret generic {cluster['spec']['authOptions']['secretName']}" in page


def test_rays_settings_equal_those_of_shoal(manifests: list[dict[str, Any]]) -> None:
    assert _named(manifests, "ConfigMap", "ray-settings")["data"] == CLUSTER_ENVIRONMENT


def test_workers_are_drained_before_they_are_killed(pods: dict[str, dict[str, Any]]) -> None:
    for name in ("cpu", "gpu"):
        [container] = pods[name]["containers"]
        assert container["lifecycle"]["preStop"]["exec"]["command"] == ["shoal-drain-node"]
        [drain_s] = [e["value"] for e in container["env"] if e["name"] == "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"]
        assert int(drain_s) + 20 <= pods[name]["terminationGracePeriodSeconds"]


def test_the_head_keeps_its_tables_on_a_volume(pods: dict[str, dict[str, Any]]) -> None:
    [head] = pods["head"]["containers"]
    variables = {one["name"]: one["value"] for one in head["env"]}
    assert variables["RAY_gcs_storage"] == "rocksdb"
    [mount] = [one for one in head["volumeMounts"] if variables["RAY_gcs_storage_path"].startswith(one["mountPath"])]
    [volume] = [one for one in pods["head"]["volumes"] if one["name"] == mount["name"]]
    assert "persistentVolumeClaim" in volume


def test_all_ray_nodes_are_selected_by_the_network_policies(manifests: list[dict[str, Any]]) -> None:
    [cluster] = [one for one in manifests if one["kind"] == "RayCluster"]
    groups = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
    for group in groups:
        assert group["template"]["metadata"]["labels"]["app.kubernetes.io/component"] == "ray"
    policies = {one["metadata"]["name"]: one["spec"] for one in manifests if one["kind"] == "NetworkPolicy"}
    assert policies["deny-ingress"] == {"podSelector": {}, "policyTypes": ["Ingress"]}
    assert policies["ray-egress"]["policyTypes"] == ["Egress"]


def _reaches(policy: dict[str, Any], component: str) -> bool:
    labels = {"app.kubernetes.io/part-of": "shoal", "app.kubernetes.io/component": component}
    selector = policy.get("podSelector", {})
    return all(labels.get(one["key"]) in one["values"] for one in selector.get("matchExpressions", ())) and all(
        labels.get(key) == value for key, value in selector.get("matchLabels", {}).items()
    )


def test_ray_and_its_gateway_reach_the_port_of_the_service_and_nothing_else_of_it(
    manifests: list[dict[str, Any]],
) -> None:
    policies = {one["metadata"]["name"]: one["spec"] for one in manifests if one["kind"] == "NetworkPolicy"}
    [rule] = policies["api"]["ingress"]
    assert rule["ports"] == [{"protocol": "TCP", "port": 8470}]
    own = [one for one in rule["from"] if "podSelector" in one]
    egress = policies["ray-egress"]["egress"]
    for component in ("ray", "gateway"):
        assert any(_reaches(one, component) for one in own)
        assert _reaches(policies["ray-egress"], component)
    [port] = [rule for rule in egress if any(_reaches(to, "control-plane") for to in rule["to"] if "podSelector" in to)]
    assert port["ports"] == [{"protocol": "TCP", "port": 8470}]


def test_the_control_plane_reaches_no_port_of_ray(manifests: list[dict[str, Any]]) -> None:
    policies = {one["metadata"]["name"]: one["spec"] for one in manifests if one["kind"] == "NetworkPolicy"}
    for name in ("ray-nodes", "ray-operator"):
        [rule] = policies[name]["ingress"]
        assert _reaches(policies[name], "ray")
        assert not any(_reaches(one, "control-plane") for one in rule["from"]), name
        assert not _reaches(policies[name], "control-plane")


def test_the_gateway_joins_as_the_cluster_of_the_server_with_its_token(
    manifests: list[dict[str, Any]], pods: dict[str, dict[str, Any]]
) -> None:
    settings = _named(manifests, "ConfigMap", "shoal-settings")["data"]
    [node, gateway] = pods["gateway"]["containers"]
    assert node["command"] == ["shoal-gateway-node"] and node["env"] == gateway["env"][:-1]
    variables = {one["name"]: one["value"] for one in gateway["env"]}
    url, *options = gateway["args"]
    assert options == [f"--name={settings['SHOAL_CLUSTER']}", f"--token-file={settings['SHOAL_CLUSTER_TOKEN_FILE']}"]
    for one in (url, variables["SHOAL_HOME_URL"]):
        address = urlsplit(one)
        assert address.hostname in settings["SHOAL_ALLOWED_HOSTS"].split(",") and address.port == 8470
    for name, token in (("gateway", "token-file"), ("shoal", "the setting")):
        mounts = [one["mountPath"] for one in pods[name]["containers"][-1]["volumeMounts"]]
        assert str(Path(settings["SHOAL_CLUSTER_TOKEN_FILE"]).parent) in mounts, token
    assert variables["RAY_HEAD"] == "shoal-head-svc:6379"


def test_the_operator_and_no_ray_pod_is_admitted_by_its_policy(manifests: list[dict[str, Any]]) -> None:
    """KubeRay gives each pod of a cluster the name kuberay; its own pods have the component kuberay-operator."""
    [rule] = _named(manifests, "NetworkPolicy", "ray-operator")["spec"]["ingress"]
    [source] = rule["from"]
    assert source["podSelector"] == {"matchLabels": {"app.kubernetes.io/component": "kuberay-operator"}}


def test_names_are_resolved_through_the_cache_of_the_node(manifests: list[dict[str, Any]]) -> None:
    """NodeLocal DNSCache has an address of the link, which the last rule refuses with the metadata services."""
    egress = _named(manifests, "NetworkPolicy", "ray-egress")["spec"]["egress"]
    [dns] = [rule for rule in egress if {"protocol": "UDP", "port": 53} in rule.get("ports", ())]
    assert {"ipBlock": {"cidr": "169.254.20.10/32"}} in dns["to"]
    [tls] = [rule for rule in egress if {"protocol": "TCP", "port": 443} in rule.get("ports", ())]
    assert tls["to"] == [{"ipBlock": {"cidr": "0.0.0.0/0", "except": ["169.254.0.0/16"]}}]


def test_sessions_of_the_head_end_with_its_pod_and_its_tables_stay(
    manifests: list[dict[str, Any]], pods: dict[str, dict[str, Any]]
) -> None:
    start = _named(manifests, "RayCluster", "shoal")["spec"]["headGroupSpec"]["rayStartParams"]
    [head] = pods["head"]["containers"]
    mounts = {one["mountPath"]: one["name"] for one in head["volumeMounts"]}
    volumes = {one["name"]: one for one in pods["head"]["volumes"]}
    assert "emptyDir" in volumes[mounts[start["temp-dir"]]]


def test_proxies_in_front_can_be_named(manifests: list[dict[str, Any]]) -> None:
    assert "SHOAL_TRUSTED_PROXIES" in _named(manifests, "ConfigMap", "shoal-settings")["data"]


def test_every_file_is_a_resource_of_the_kustomization() -> None:
    kustomization = yaml.safe_load((FOLDER / "kustomization.yaml").read_text("utf-8"))
    assert {*kustomization["resources"], "kustomization.yaml"} == {path.name for path in FOLDER.glob("*.yaml")}


def test_the_token_of_the_control_plane_comes_from_a_secret_and_stays_over_restarts(
    manifests: list[dict[str, Any]], tmp_path: Path, store: Store
) -> None:
    """The script of the init container, run with directories of this test; the server adopts what it copies."""
    pod = _named(manifests, "Deployment", "shoal")["spec"]["template"]["spec"]
    [init] = pod["initContainers"]
    volumes = {one["name"]: one for one in pod["volumes"]}
    mounts = {one["name"]: one["mountPath"] for one in init["volumeMounts"]}
    assert volumes["admin-token"]["secret"] == {
        "secretName": "shoal-admin-token",
        "defaultMode": 0o440,
        "optional": True,
    }
    secret, state, token = tmp_path / "secret", tmp_path / "state", new_token()
    for directory in (secret, state):
        directory.mkdir()
    [*shell, script] = init["command"]
    script = script.replace(mounts["admin-token"], str(secret)).replace(mounts["state"], str(state))
    subprocess.run([*shell, script], check=True)
    assert list(state.iterdir()) == [], "without the secret"
    (secret / ADMIN_TOKEN_FILE).write_text(token)
    (secret / ADMIN_TOKEN_FILE).chmod(0o440)
    for _ in range(2):  # the second start finds an empty directory again
        shutil.rmtree(state)
        state.mkdir()
        subprocess.run([*shell, script], check=True)
        path = ensure_admin_token(store, state, now=1.0)
        assert path.read_text().strip() == token and path.stat().st_mode & 0o777 == 0o600
    assert len(store.reading(access.list_tokens)()) == 1
