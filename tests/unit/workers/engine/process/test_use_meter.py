from __future__ import annotations

import os
import threading
from pathlib import Path

from shoal_workers.contract.messages import StepPart
from shoal_workers.engine.process.use_meter import (
    Shares,
    UseMeter,
    network_bytes,
    resident_bytes,
    share_of_memory,
)


def test_a_measurement_has_the_memory_and_the_filesystems_of_this_process(tmp_path: Path) -> None:
    meter = UseMeter(str(tmp_path / "not" / "made" / "yet"), has_gpu=False)
    first, second = meter.measure(), meter.measure()
    assert first.cpu_cores is None and second.cpu_cores is not None and second.cpu_cores >= 0
    assert first.resident_bytes > 2**20
    assert first.disk_bytes > first.disk_free_bytes > 0
    assert (first.gpu_bytes, first.gpu_busy) == (0, None)
    assert first.at <= second.at


def test_memory_of_other_workers_that_is_mapped_is_not_counted(tmp_path: Path) -> None:
    meter = UseMeter(str(tmp_path), has_gpu=False)
    meter.mapped_bytes = lambda: 1 << 60
    assert meter.measure().resident_bytes == 0


def test_checkpoints_in_an_object_store_are_measured_by_the_temporary_files() -> None:
    assert UseMeter("s3://bucket/checkpoints", has_gpu=False).measure().disk_bytes > 0


def test_its_own_thread_measures_until_it_is_stopped(tmp_path: Path) -> None:
    measured = threading.Event()

    class Signalling(UseMeter):
        def measure(self):  # type: ignore[no-untyped-def]
            found = super().measure()
            measured.set()
            return found

    meter = Signalling(f"file://{tmp_path}", has_gpu=False, every_s=3600)
    meter.start()
    assert measured.wait(60)
    meter.stop()


def test_shared_pages_are_counted_again_when_a_process_has_grown_and_once_in_a_while() -> None:
    resident, asked = {7: 1000}, []

    def share(pid: int) -> int:
        asked.append(pid)
        return resident[pid] - 400

    shares = Shares(lambda pid: resident[pid], share)
    assert shares.of([7], 0.0) == 600 and asked == [7]
    resident[7] = 1050
    assert shares.of([7], 5.0) == 650 and asked == [7], "what was added is its own"
    resident[7] = 1200
    assert shares.of([7], 10.0) == 800 and asked == [7, 7]
    assert shares.of([7], 1000.0) == 800 and asked == [7, 7, 7]
    assert shares.of([], 1001.0) == 0
    assert shares.of([7], 1002.0) == 800 and asked == [7, 7, 7, 7], "another process may have its number"


def test_the_share_of_a_process_is_a_part_of_what_is_resident() -> None:
    assert 0 < share_of_memory(os.getpid()) <= resident_bytes("self") + 2**20


def test_the_second_measurement_has_rates_of_network_and_disk(tmp_path: Path) -> None:
    meter = UseMeter(str(tmp_path), has_gpu=False)
    first = meter.measure()
    assert (first.received_bytes_s, first.sent_bytes_s, first.read_bytes_s, first.written_bytes_s) == (None,) * 4
    with (tmp_path / "file").open("wb") as file:
        file.write(os.urandom(1 << 20))
        os.fsync(file.fileno())
    second = meter.measure()
    rates = (second.received_bytes_s, second.sent_bytes_s, second.read_bytes_s, second.written_bytes_s)
    assert all(rate is not None and rate >= 0 for rate in rates)


def test_all_interfaces_but_the_loopback_are_counted(tmp_path: Path) -> None:
    table = tmp_path / "dev"
    table.write_text(
        "Inter-|   Receive                    |  Transmit\n"
        " face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo colls carrier\n"
        "    lo: 900 1 0 0 0 0 0 0 900 1 0 0 0 0 0 0\n"
        "  eth0: 10 1 0 0 0 0 0 0 20 1 0 0 0 0 0 0\n"
        "  ib0:300 1 0 0 0 0 0 0 400 1 0 0 0 0 0 0\n"
    )
    assert network_bytes(str(table)) == (310, 420)
    assert network_bytes(str(tmp_path / "none")) == (None, None)


def test_phases_are_shares_of_the_time_that_was_booked_since_the_measurement_before(tmp_path: Path) -> None:
    meter, spent = UseMeter(str(tmp_path), has_gpu=False), {StepPart.FORWARD: 1.0, StepPart.COMMUNICATION: 3.0}
    assert meter.measure().phases == {}, "a script"
    meter.part_seconds = spent.copy
    assert meter.measure().phases == {StepPart.FORWARD: 0.25, StepPart.COMMUNICATION: 0.75}
    assert meter.measure().phases == {}, "no phase has ended"
    spent |= {StepPart.FORWARD: 0.5, StepPart.COMMUNICATION: 5.0}
    assert meter.measure().phases == {StepPart.FORWARD: 0.0, StepPart.COMMUNICATION: 1.0}
