"""The probation test of a node with real processes: correct ones pass, and one wrong bit in transit is found."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

from kit.processes.fleet import PATIENCE_S
from kit.processes.warm import warm_python
from shoal_service.gateway.ray_cluster import NodeTestActor
from shoal_workers import node_test

_HALF = """
import sys
from shoal_workers import node_test
print(node_test.pair_fault(int(sys.argv[2]), "127.0.0.1", int(sys.argv[1]), round_name="test", timeout_s=120.0))
"""
_LYING = str(Path(__file__).parents[2] / "kit" / "programs" / "lying_partner.py")


def test_a_correct_machine_passes_the_matrix_product() -> None:
    assert node_test.matmul_fault() == ""


def test_two_correct_processes_pass() -> None:
    port = _free_port()
    first, second = _start("-c", _HALF, port, 0), _start("-c", _HALF, port, 1)
    assert (_output_of(first), _output_of(second)) == ("", "")


def test_a_partner_that_sends_a_wrong_bit_is_found() -> None:
    port = _free_port()
    sound, lying = _start("-c", _HALF, port, 0), _start(_LYING, port)
    assert _output_of(sound) == "the block from rank 1 arrived with other bits"
    _output_of(lying)


def _start(*arguments: object) -> subprocess.Popen[str]:
    command = [warm_python(), *(str(argument) for argument in arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _output_of(process: subprocess.Popen[str]) -> str:
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, errors
    return output.strip()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as chosen:
        port: int = chosen.getsockname()[1]
        return port


def test_a_partner_that_does_not_answer_is_a_fault_in_words_and_not_an_exception_of_torch() -> None:
    with socket.socket() as closed:  # bound, and listens to nobody
        closed.bind(("127.0.0.1", 0))
        fault = NodeTestActor().pair(1, "127.0.0.1", closed.getsockname()[1], "round", 1.0)
    assert "Error" in fault and "127.0.0.1" in fault
