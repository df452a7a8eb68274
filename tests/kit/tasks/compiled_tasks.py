"""A task that notes what torch.compile has done in its process so far."""

import json
import os
from pathlib import Path

from cast_tasks import Untied
from torch._dynamo.utils import counters


class Compiled(Untied):
    def loss(self, model, batch):
        found = super().loss(model, batch)
        noted = {
            "graphs": counters["stats"]["unique_graphs"],
            "misses": counters["aot_autograd"]["autograd_cache_miss"],
            "directory": os.environ["TORCHINDUCTOR_CACHE_DIR"],
        }
        Path(self.data["notes"], f"{os.getpid()}.json").write_text(json.dumps(noted))
        return found
