"""Another user of a Ray cluster: holds CPUs until its standard input ends.

python foreign_tenant.py ADDRESS CPUS        prints "ready" once it has them
"""

import sys

import ray


@ray.remote
class Tenant:
    def ready(self) -> str:
        return "ready"


ray.init(sys.argv[1], namespace="tenants", log_to_driver=False, logging_level="ERROR")
tenant = Tenant.options(num_cpus=float(sys.argv[2])).remote()
print(ray.get(tenant.ready.remote()), flush=True)
sys.stdin.read()
