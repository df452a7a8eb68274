"""A worker process of the tests: the main thread trains, and a second thread executes commands from the connection.

Strikes are faults at an exact place: (phase, completed steps, nth entry in this generation) -> what happens.
"""

import faulthandler
import importlib
import operator
import os
import queue
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Client
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.messages import Phase
from shoal_workers.engine.engine import Engine
from shoal_workers.engine.generation_ends import TaskFailed
from shoal_workers.engine.group.store.client import GenerationStore
from shoal_workers.engine.group.store.server import StoreServer
from shoal_workers.engine.process.outbox import Outbox
from shoal_workers.snapshot_store.store import SnapshotStore

faulthandler.enable()
sys.path[:0] = [str(Path(__file__).parents[1] / "tasks"), str(Path(__file__).parents[2])]
PUBLISHED = "published"
"""Within CONNECTING: this rank's address is in the store, and it has connected to no other rank."""


class WorkerProcess:
    def __init__(self, connection):
        self.connection = connection
        self.sending = threading.Lock()
        self.assignments = queue.Queue()
        self.go = threading.Event()
        self.strikes = {}
        self.entered = {}
        self.cpu_marks = []
        self.outbox = Outbox("worker-under-test")
        self.engine = None
        self.snapshot_store = None

    def send(self, kind, value):
        with self.sending:
            self.connection.send((kind, value))

    def on_phase(self, phase, step):
        self.cpu_marks.append((str(phase), step, time.process_time()))
        key = (str(phase), step)
        self.entered[key] = self.entered.get(key, 0) + 1
        action = self.strikes.pop((*key, self.entered[key]), None)
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif action == "kill within":  # the update's lerp of its averages: parameters are written, by weight decay
            torch._foreach_lerp_ = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
        elif action == "stop":
            self.send("reached", key)
            os.kill(os.getpid(), signal.SIGSTOP)
        elif action == "hold":
            self.go.clear()
            self.send("reached", key)
            self.go.wait()
        elif action == "dump":
            self.send("dumped", self.state())
        elif action == "flip":
            self.flip_a_bit()
        elif action == "flip to inf":
            self.flip_a_bit_of_the_exponent()
        elif action is not None and action.startswith("flip in "):
            self.flip_a_bit(action.removeprefix("flip in "))
        elif action == "fault":
            os.environ["SHOALTEST_FAULT"] = "on"
        elif action == "no fault":
            del os.environ["SHOALTEST_FAULT"]
        elif action == "report":
            self.send("reached", key)
        if phase == Phase.CONNECTING:
            self.on_address_published(lambda: self.on_phase(PUBLISHED, step))

    def on_address_published(self, act):
        """torch's first read from the store follows right after it has written this rank's address."""
        plain = GenerationStore.multi_get

        def multi_get(store, *arguments):
            GenerationStore.multi_get = plain
            act()
            return plain(store, *arguments)

        GenerationStore.multi_get = multi_get

    def flip_a_bit(self, parameter=""):
        """In the memory of a parameter of which this rank has a part."""
        tensors = self.engine._program.runtime.state.view.tensors()
        prefix = f"model.{parameter}"
        own = [t.to_local() if isinstance(t, DTensor) else t for name, t in tensors.items() if name.startswith(prefix)]
        octets = next(t for t in own if t.numel()).detach().reshape(-1).view(torch.uint8)
        octets[2] ^= 1 << 6

    def flip_a_bit_of_the_exponent(self):
        """In the first parameter with values from 1 up: they are infinite or no number then."""
        tensors = self.engine._program.runtime.state.view.tensors()
        own = [t.to_local() for name, t in tensors.items() if name.startswith("model.") and isinstance(t, DTensor)]
        values = next(t for t in own if bool((t >= 1).any())).detach().reshape(-1)
        values.view(torch.int32)[int((values >= 1).nonzero()[0])] ^= 1 << 30

    def state(self):
        """This rank's part of every tensor: name -> (global shape, offsets of the part, its values)."""
        tensors = self.engine._program.runtime.state.view.tensors()
        return {name: _part(tensor) for name, tensor in tensors.items()}

    def serve(self):
        try:
            while True:
                name, arguments = self.connection.recv()
                self.send("reply", getattr(self, f"do_{name}")(*arguments))
                if name == "run":  # after the reply: a strike may kill this process at once
                    self.assignments.put(*arguments)
        except EOFError:
            self.assignments.put(None)

    def do_call(self, function, *arguments):
        """`package.module:name` of this process, whatever it is."""
        module, _, name = function.partition(":")
        return operator.attrgetter(name)(importlib.import_module(module))(*arguments)

    def do_create(self, spec, checkpoint_root, memory, by_axis):
        if memory is not None:
            root, node_id = memory
            self.snapshot_store = SnapshotStore(
                job_id="job", attempt=1, worker_id=f"worker-{os.getpid()}", node_id=node_id, key="key", root=Path(root)
            )
        self.engine = Engine(
            parse_spec(spec),
            checkpoint_root=checkpoint_root,
            outbox=self.outbox,
            store=StoreServer("127.0.0.1", "key"),
            snapshot_store=self.snapshot_store,
            on_phase=self.on_phase,
            node_directory=self.snapshot_store.registry.node if self.snapshot_store else None,
            by_axis=by_axis,
        )
        return self.engine.store_port, self.snapshot_store.port if self.snapshot_store else 0

    def do_model_id(self):
        """Identifies the model object."""
        return id(self.engine._program.runtime.assembly.parts[0])

    def do_strike(self, phase, step, action, count):
        assert phase in [*Phase, PUBLISHED]
        self.strikes[phase, step, count] = action

    def do_run(self, assignment):
        """`serve` hands the assignment over."""
        self.entered.clear()
        self.cpu_marks.clear()

    def do_prepare(self):
        try:
            self.engine.prepare()
        except TaskFailed as error:
            return error.report
        return None

    def do_cpu_marks(self):
        """Phases that this generation has entered, each with the completed steps and this process's CPU seconds."""
        return list(self.cpu_marks)

    def do_note(self):
        return self.engine.progress.note

    def do_interrupt(self, generation):
        return self.engine.interrupt(generation)

    def do_request_yield(self, generation, durable=True):
        return self.engine.request_yield(generation, durable=durable)

    def do_request_profile(self, generation, request):
        return self.engine.request_profile(generation, request)

    def do_signs(self):
        return self.engine.signs()

    def do_part_seconds(self):
        return dict(self.engine.part_seconds())

    def do_poll(self, after):
        return self.outbox.poll(after, 0.0, self.engine.progress)

    def do_go(self):
        self.go.set()

    def do_mapped_bytes(self):
        """Bytes of other workers' live slots, once the maps that were begun are made."""
        assert self.snapshot_store.peer_maps.wait(60)
        return self.snapshot_store.peer_maps.num_bytes

    def do_resource_counts(self):
        """Open descriptors and threads."""
        return len(list(Path("/proc/self/fd").iterdir())), len(list(Path("/proc/self/task").iterdir()))

    def do_memory(self):
        """Resident bytes, without pages of files and shared memory, and keys in this worker's rendezvous store."""
        fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(fields["RssAnon"].split()[0]) << 10, self.engine._store.num_keys

    def do_gpu_bytes(self):
        """Bytes of this worker's live tensors on its GPU."""
        return torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0

    def train(self):
        while (assignment := self.assignments.get()) is not None:
            try:
                self.send("exit", self.engine.run(assignment))
            except Exception as error:
                error.add_note(traceback.format_exc())
                self.send("exit", error)
                raise


def _part(tensor):
    shape, local, offsets = tuple(tensor.shape), tensor, (0,) * tensor.ndim
    if isinstance(tensor, DTensor):
        local = tensor.to_local()
        _, offsets = compute_local_shape_and_global_offset(shape, tensor.device_mesh, tensor.placements)
    return shape, tuple(offsets), local.detach().cpu().numpy().copy()


def main(address):
    process = WorkerProcess(Client(address, family="AF_UNIX"))
    process.send("pid", os.getpid())
    threading.Thread(target=process.serve, daemon=True).start()
    process.train()


main(sys.argv[1])
os._exit(0)  # its threads are not waited for
