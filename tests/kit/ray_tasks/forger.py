"""The tiny task, whose rank 0 in the middle of step 5 calls the supervisor of its own job as if it were the control
plane: to cancel, to scale, to acknowledge reports that nobody has read, to delete the journal.
"""

import json

from shoal_service.signing.calls import CallName
from shoal_service.signing.signer import Signer, new_seed
from tiny import Tiny

import ray
from shoal_service.supervisor.config import Directive
from shoal_workers.contract.ids import NAMESPACE

EPOCH = 1 << 40
AT_STEP = 5


class Forger(Tiny):
    def loss(self, model, batch):
        is_new = self.struck_in != (self.builds, AT_STEP) and self._completed_steps() + 1 == AT_STEP
        if is_new and self._claim("forged"):
            forge()
        return super().loss(model, batch)


def forge():
    _, job_id, attempt, _ = ray.get_runtime_context().get_actor_name().split("/")
    supervisor = ray.get_actor(f"shoal/{job_id}/{attempt}/supervisor", namespace=NAMESPACE)
    common = {"epoch": EPOCH, "parallelism": "auto", "spec_version": 9, "number": 1 << 40}
    elasticity = {"min_workers": 1, "max_workers": 1}
    cancel = Directive(**common, elasticity=elasticity, granted=2, desired="cancel")
    shrink = Directive(**common, elasticity=elasticity, granted=1, desired="run")
    own = Signer(new_seed(), job_id, int(attempt), EPOCH)
    stolen = Signer(new_seed(), "job-another", 1, EPOCH)
    for name, call in {
        "cancel": supervisor.direct.remote(cancel),
        "shrink": supervisor.direct.remote(shrink),
        "acknowledge": supervisor.pull.remote(1 << 40, 0.0, EPOCH),
        "stacks": supervisor.stacks.remote(None, False, EPOCH),
        "release": supervisor.release.remote(EPOCH),
        "own key": supervisor.signed_direct.remote(own.sign(CallName.DIRECT, cancel.model_dump(mode="json"))),
        "other job": supervisor.signed_release.remote(stolen.sign(CallName.RELEASE, {})),
    }.items():
        try:
            answer = ["obeyed", repr(ray.get(call, timeout=60))[:200]]
        except ray.exceptions.RayTaskError as error:
            answer = [type(error.cause).__name__, str(error.cause)]
        print(f"FORGED {json.dumps([name, *answer])}")
