"""The Helm chart: it passes `helm lint`, refuses wrong values, and its manifests pass the checks of the others.

Helm comes as a library in a Python package (decision 0041).
"""

import json
import re
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from kit.deploy.ray_cluster_fields import mistakes
from kit.requirements import missing, require
from shoal_workers.version import VERSION

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
CHART = DEPLOY / "helm" / "shoal"
EVERYTHING: dict[str, Any] = {
    "image": {"tag": "1.2.3", "pullSecrets": ["registry"]},
    "database": {"url": "postgresql://shoal:secret@db/shoal"},
    "settings": {"SHOAL_LOG_LEVEL": "debug"},
    "trustedProxies": ["10.0.0.0/8"],
    "ingress": {"enabled": True, "className": "nginx", "host": "shoal.example", "tlsSecret": "tls"},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "alerts": {"enabled": True},
    "dashboards": {"enabled": True},
}
_OF_PROMETHEUS = ("ServiceMonitor", "PrometheusRule")
"""Kinds whose schemas no Python package has."""


@pytest.fixture(scope="session", autouse=True)
def helm() -> Any:
    if find_spec("helm_python") is None:
        missing("helm", "the Python package helm-python-sdk is not installed")
    import kubernetes_manifests

    return kubernetes_manifests


def _documents(helm: Any, values: dict[str, Any], namespace: str = "train") -> list[dict[str, Any]]:
    texts = helm.rendered(values, namespace=namespace).values()
    return [one for text in texts for one in yaml.safe_load_all(text) if one]


def _named(documents: list[dict[str, Any]], kind: str, name: str = "shoal") -> dict[str, Any]:
    [found] = [one for one in documents if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    return found


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["default", "everything"])
def test_helm_lint_has_no_findings(helm: Any, values: dict[str, Any]) -> None:
    report = helm.helm_python.lint(helm.CHART, values, strict=True)
    assert report["errors"] == [] and report["total_charts_linted"] == 1
    assert [one["error"] for one in report["messages"] if one["severity"] > 1] == []


def test_the_manifests_for_kustomize_are_those_of_the_default_values(helm: Any) -> None:
    written = {path.name: path.read_text("utf-8") for path in helm.FOLDER.glob("*.yaml")}
    made = helm.files()
    assert {name: written.get(name) for name in made} == made, "run `make docs`"
    assert written.keys() - made.keys() == {"kustomization.yaml", "namespace.yaml"}


@pytest.mark.parametrize(
    "values",
    [
        EVERYTHING,
        {"rayCluster": {"create": False, "address": "ray.example:6379"}},
        {"checkpoints": {"url": "s3://bucket/shoal"}},
        {"checkpoints": {"existingClaim": "mine"}, "networkPolicies": {"enabled": False}},
    ],
    ids=["everything", "an existing cluster", "an object store", "an existing claim"],
)
def test_the_manifests_follow_the_schemas(helm: Any, values: dict[str, Any]) -> None:
    documents = _documents(helm, values)
    for document in documents:
        if document["kind"] == "RayCluster":
            assert list(mistakes(document)) == []
            groups = [document["spec"]["headGroupSpec"], *document["spec"]["workerGroupSpecs"]]
            for group in groups:
                pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": group["template"]["spec"]}
                kubernetes_validate.validate(pod, "1.37", strict=True)
        elif document["kind"] not in _OF_PROMETHEUS:
            kubernetes_validate.validate(document, "1.37", strict=True)
    claims = {one["metadata"]["name"] for one in documents if one["kind"] == "PersistentVolumeClaim"}
    used = set(re.findall(r"claimName': '([\w-]+)'", str(documents)))
    assert claims == used - {"mine"}


def test_the_gateway_reaches_the_cluster_that_exists_and_the_nodes_the_service(helm: Any) -> None:
    values = {"rayCluster": {"create": False, "address": "ray.example:6379"}, "gateway": {"cluster": "east-1"}}
    documents = _documents(helm, values)
    [node, container] = _named(documents, "Deployment", "gateway")["spec"]["template"]["spec"]["containers"]
    assert node["env"][0] == {"name": "RAY_HEAD", "value": "ray.example:6379"}
    variables = {one["name"]: one["value"] for one in container["env"]}
    assert variables["RAY_HEAD"] == "ray.example:6379"
    assert variables["SHOAL_HOME_URL"] == "http://shoal.train.svc:8470"
    settings = _named(documents, "ConfigMap", "shoal-settings")["data"]
    assert settings["SHOAL_CLUSTER"] == "east-1" and "--name=east-1" in container["args"]


def test_the_ingress_has_tls_and_the_server_knows_its_name_and_its_proxy(helm: Any) -> None:
    documents = _documents(helm, EVERYTHING)
    assert _named(documents, "Ingress")["spec"]["tls"] == [{"hosts": ["shoal.example"], "secretName": "tls"}]
    settings = _named(documents, "ConfigMap", "shoal-settings")["data"]
    assert {"shoal.example", "shoal.train.svc"} <= set(settings["SHOAL_ALLOWED_HOSTS"].split(","))
    assert settings["SHOAL_TRUSTED_PROXIES"] == "10.0.0.0/8" and settings["SHOAL_LOG_LEVEL"] == "debug"


def test_prometheus_scrapes_with_a_token_and_its_alerts_link_to_the_server(helm: Any, tmp_path: Path) -> None:
    documents = _documents(helm, EVERYTHING)
    monitor, service = _named(documents, "ServiceMonitor")["spec"], _named(documents, "Service")
    [endpoint] = monitor["endpoints"]
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    assert endpoint["authorization"] == {"credentials": {"name": "shoal-prometheus", "key": "token"}}
    rules = _named(documents, "PrometheusRule")["spec"]
    links = [rule["annotations"]["runbook_url"] for rule in rules["groups"][0]["rules"] if "alert" in rule]
    assert links and all(link.startswith("https://shoal.example/runbook#") for link in links)
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump(rules))
    promtool = require("prometheus", "promtool")
    checked = subprocess.run([promtool, "check", "rules", file], capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stderr


def test_grafana_gets_the_dashboards(helm: Any) -> None:
    documents = _documents(helm, EVERYTHING)
    for path in (DEPLOY / "grafana").glob("*.json"):
        data = _named(documents, "ConfigMap", f"shoal-dashboard-{path.stem}")["data"]
        assert json.loads(data[f"shoal-{path.stem}.json"]) == json.loads(path.read_text("utf-8"))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"ingress": {"enabled": True, "host": "shoal.example"}}, "tlsSecret"),
        ({"rayCluster": {"create": False}}, "address"),
        ({"replica": 3}, "replica"),
        ({"gateway": {"cluster": "East"}}, "cluster"),
        ({"settings": {"LOG_LEVEL": "debug"}}, "LOG_LEVEL"),
        ({"checkpoints": {"url": "/elsewhere"}}, "url"),
    ],
)
def test_wrong_values_are_refused_by_name(helm: Any, values: dict[str, Any], words: str) -> None:
    with pytest.raises(helm.helm_python.HelmError, match=words):
        helm.rendered(values)


def test_the_chart_installs_this_release(helm: Any) -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text("utf-8"))
    assert chart["version"] == chart["appVersion"] == VERSION
    assert f"image: shoal-control-plane:{VERSION}" in helm.files()["control-plane.yaml"]


def test_every_value_is_used_by_a_template(helm: Any) -> None:
    templates = "".join(path.read_text("utf-8") for path in (CHART / "templates").iterdir())
    values = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
    for name, value in values.items():
        for key in value if isinstance(value, dict) and f"toYaml .Values.{name} " not in templates else ():
            assert f".Values.{name}.{key}" in templates, f"{name}.{key}"
        assert f".Values.{name}" in templates, name
