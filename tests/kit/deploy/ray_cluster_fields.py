"""The fields of a RayCluster (ray.io/v1) as KubeRay declares them, by release, and a check of a manifest against them.

The table is that of KubeRay 1.7, written from the Go types of the operator: names, required ones, and kinds of values.
`SINCE` says what an older operator does not know. Templates of pods are not in it: they are validated with the schemas
of Kubernetes. Called by tests/unit/deploy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

Values = type | tuple[str, ...] | dict[str, type] | str
"""A type; the allowed words; a mapping of text to a type; or the name of a group of fields, `[NAME]` for a list."""


@dataclass(frozen=True)
class Fields:
    known: dict[str, Values]
    required: frozenset[str] = field(default_factory=frozenset)


_TEXTS: dict[str, type] = {"": str}
_POD = "a template of a pod"
GROUPS = {
    "RayCluster": Fields(
        {"apiVersion": ("ray.io/v1",), "kind": ("RayCluster",), "metadata": dict, "spec": "RayClusterSpec"},
        frozenset({"apiVersion", "kind", "metadata", "spec"}),
    ),
    "RayClusterSpec": Fields(
        {
            "upgradeStrategy": "UpgradeStrategy",
            "authOptions": "AuthOptions",
            "suspend": bool,
            "managedBy": ("ray.io/kuberay-operator", "kueue.x-k8s.io/multikueue"),
            "autoscalerOptions": "AutoscalerOptions",
            "headServiceAnnotations": _TEXTS,
            "enableInTreeAutoscaling": bool,
            "gcsFaultToleranceOptions": dict,
            "headGroupSpec": "HeadGroupSpec",
            "rayVersion": str,
            "workerGroupSpecs": "[WorkerGroupSpec]",
        },
        frozenset({"headGroupSpec"}),
    ),
    "UpgradeStrategy": Fields({"type": ("Recreate", "None")}),
    "AuthOptions": Fields({"enableK8sTokenAuth": bool, "secretName": str, "mode": ("disabled", "token")}),
    "AutoscalerOptions": Fields(
        {
            "resources": dict,
            "image": str,
            "imagePullPolicy": ("Always", "IfNotPresent", "Never"),
            "securityContext": dict,
            "idleTimeoutSeconds": int,
            "upscalingMode": ("Default", "Aggressive", "Conservative"),
            "version": ("v1", "v2"),
            "env": list,
            "envFrom": list,
            "volumeMounts": list,
            "command": list,
            "args": list,
        }
    ),
    "HeadGroupSpec": Fields(
        {
            "template": _POD,
            "headService": dict,
            "enableIngress": bool,
            "resources": _TEXTS,
            "labels": _TEXTS,
            "rayStartParams": _TEXTS,
            "serviceType": ("ClusterIP", "NodePort", "LoadBalancer"),
        },
        frozenset({"template", "rayStartParams"}),
    ),
    "WorkerGroupSpec": Fields(
        {
            "suspend": bool,
            "groupName": str,
            "replicas": int,
            "minReplicas": int,
            "maxReplicas": int,
            "idleTimeoutSeconds": int,
            "resources": _TEXTS,
            "labels": _TEXTS,
            "rayStartParams": _TEXTS,
            "template": _POD,
            "scaleStrategy": dict,
            "numOfHosts": int,
        },
        frozenset({"groupName", "minReplicas", "maxReplicas", "template"}),
    ),
}


NEWEST = (1, 7)
SINCE = {
    ("RayClusterSpec", "authOptions"): (1, 5),
    ("RayClusterSpec", "upgradeStrategy"): (1, 6),
    ("AuthOptions", "secretName"): (1, 6),
    ("AuthOptions", "enableK8sTokenAuth"): (1, 6),
    ("AutoscalerOptions", "args"): (1, 7),
    ("AutoscalerOptions", "command"): (1, 7),
    ("HeadGroupSpec", "labels"): (1, 5),
    ("HeadGroupSpec", "resources"): (1, 5),
    ("WorkerGroupSpec", "labels"): (1, 5),
    ("WorkerGroupSpec", "resources"): (1, 5),
}
"""Group and field -> the first release of the operator that knows it, if that is not 1.4 or older."""


def mistakes(
    manifest: Any, group: str = "RayCluster", where: str = "", operator: tuple[int, int] = NEWEST
) -> Iterator[str]:
    """What this release of the operator refuses or drops, in words, each with the path of its field."""
    if not isinstance(manifest, dict):
        yield f"{where or group} is not a mapping"
        return
    fields = GROUPS[group]
    yield from (f"{where}.{name} is missing" for name in sorted(fields.required - manifest.keys()))
    for name, value in manifest.items():
        path = f"{where}.{name}"
        if name not in fields.known:
            yield f"{path} is not a field of {group}"
        elif SINCE.get((group, name), operator) > operator:
            yield f"{path} is not a field before KubeRay {'.'.join(map(str, SINCE[group, name]))}"
        else:
            yield from _of_value(value, fields.known[name], path, operator)


def _of_value(value: Any, expected: Values, path: str, operator: tuple[int, int]) -> Iterator[str]:
    if expected == _POD:
        if not isinstance(value, dict) or not value.get("spec", {}).get("containers"):
            yield f"{path} has no containers"
    elif isinstance(expected, str) and expected.startswith("["):
        for index, item in enumerate(value):
            yield from mistakes(item, expected.strip("[]"), f"{path}[{index}]", operator)
    elif isinstance(expected, str):
        yield from mistakes(value, expected, path, operator)
    elif isinstance(expected, tuple):
        if value not in expected:
            yield f"{path} {value!r} is none of {', '.join(expected)}"
    elif isinstance(expected, dict):
        yield from (f"{path}.{key} {item!r} is not text" for key, item in value.items() if not isinstance(item, str))
    elif type(value) is not expected:
        yield f"{path} {value!r} is not a {expected.__name__}"
