"""The tiny task, whose rank 0 in the middle of step 5 acts as if it were the control plane, or another supervisor: it
calls the supervisor of its own job, and dials the service with what it finds.
"""

import json
import urllib.error
import urllib.request

from tiny import Tiny

import ray
from shoal_workers.contract.ids import NAMESPACE

AT_STEP = 5
CALLS = ("pull", "direct", "stacks", "release", "signed_pull", "signed_direct", "signed_stacks", "signed_release")


class Forger(Tiny):
    def loss(self, model, batch):
        is_new = self.struck_in != (self.builds, AT_STEP) and self._completed_steps() + 1 == AT_STEP
        if is_new and self._claim("forged"):
            forge()
        return super().loss(model, batch)


def forge():
    _, job_id, attempt, _ = ray.get_runtime_context().get_actor_name().split("/")
    supervisor = ray.get_actor(f"shoal/{job_id}/{attempt}/supervisor", namespace=NAMESPACE)
    say("calls", [name for name in CALLS if hasattr(supervisor, name)])
    from ray.experimental import internal_kv

    raw = internal_kv._internal_kv_get(f"{job_id}/{attempt}/config", namespace=b"shoal-journal")
    home = json.loads(raw)["home"]
    own = f"/v1/jobs/{job_id}/attempts/{attempt}"
    for name, method, path, token in (
        ("without a token", "POST", f"{own}/reports", ""),
        ("with a made up token", "POST", f"{own}/reports", "shoal-attempt_" + "x" * 43),
        ("cancel with its own token", "POST", f"/v1/jobs/{job_id}/cancel", home["token"]),
        ("read with its own token", "GET", "/v1/jobs", home["token"]),
        ("another job with its own token", "POST", "/v1/jobs/job-another/attempts/1/reports", home["token"]),
        ("another attempt with its own token", "GET", f"/v1/jobs/{job_id}/attempts/7/directive", home["token"]),
    ):
        say(name, status(home["url"] + path, method, token))


def status(url, method, token):
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}
    body = b'{"life": 9, "after": 0}' if method == "POST" else None
    try:
        return urllib.request.urlopen(urllib.request.Request(url, body, headers, method=method), timeout=30).status
    except urllib.error.HTTPError as error:
        return error.code


def say(name, answer):
    print(f"FORGED {json.dumps([name, answer])}")
