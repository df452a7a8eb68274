"""The Ray process with a FakeCluster in place of Ray, or one that breaks the rules: FAKE_RAY_PROCESS says how.

serve  answers as the real one
junk   answers each call with something else than the answer
huge   announces a frame of a terabyte
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from doubles.fake_cluster import FakeCluster
from shoal_service.control.protocols import UnusedPackages
from shoal_service.control.ray_process import calls
from shoal_service.control.ray_process.child import serve
from shoal_service.control.ray_process.frames import Frame, receive
from shoal_service.core.nodes import Node

PACKAGES = UnusedPackages("a", "127.0.0.1", "f" * 32, 1_000, 60.0)
NODE = Node(node_id="a", ip="127.0.0.1", alive=True, cpus=2.0, gpus=0.0, memory_gib=1.0, labels={"zone": "x"})


class Served(FakeCluster):
    """Without Ray."""

    def connect(self, address: str) -> None:
        self.address = address
        self.packages = [PACKAGES]

    def disconnect(self) -> None:
        pass

    def why_gone(self, job_id: str, attempt: int) -> str:
        return f"{self.avoided} {self.places}"

    def upload_code(self, job_id: str, attempt: int, archive: bytes) -> str:
        self.change_nodes(NODE)
        return f"gcs://{len(archive)}.zip"

    def reap(self, job_id: str, attempt: int) -> int:
        raise ValueError("a bug " * 10_000)


def misbehave(how: str) -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    while True:
        header = calls.RequestHeader.model_validate_json(receive(connection).header)
        answer = calls.AnswerHeader(number=header.number).model_dump_json().encode()
        if header.name == "Connect":
            connection.sendall(Frame(answer, b"null").pack())
        elif how == "junk":
            connection.sendall(Frame(answer, b'{"nodes": [{"node_id": "a", "__reduce__": "os.system"}]}').pack())
        else:
            connection.sendall(struct.pack("!IQ", len(answer), 1 << 40) + answer)


if __name__ == "__main__":
    if (how := os.environ["FAKE_RAY_PROCESS"]) == "serve":
        serve(Served((NODE,)))
    misbehave(how)
