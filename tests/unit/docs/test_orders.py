"""Twelve orders of events of a recovery that the fault matrix (docs/recovery.md) does not reach have tests that run."""

import ast
import re
from dataclasses import dataclass

from kit.cases import failed_cases
from kit.sources import ROOT


@dataclass(frozen=True, slots=True)
class Order:
    happens: str
    holds: str
    tests: tuple[str, ...]
    """Each as `file::test`."""


ORDERS = (
    Order(
        "The supervisor dies between the journal and an order",
        "its successor repeats the order; no step is lost",
        (
            "tests/unit/service/supervisor/test_death_before_command.py::test_a_supervisor_that_dies_before_a_command_changes_nothing",
        ),
    ),
    Order(
        "A rank dies while the group connects",
        "the others leave within seconds, and none is blamed",
        (
            "tests/dist/group/test_connecting.py::test_survivors_of_a_rank_lost_while_it_connects_leave_and_re_form",
            "tests/dist/group/test_connecting.py::test_connecting_fails_after_its_own_time_limit",
        ),
    ),
    Order(
        "Two supervisors of one attempt",
        "workers refuse the older one, which commits, deletes and ends nothing",
        (
            "tests/unit/service/supervisor/test_two_supervisors.py::test_a_group_that_the_older_one_formed_without_the_journal_is_left_and_shares_no_number",
            "tests/unit/service/supervisor/test_two_supervisors.py::test_the_older_one_ends_no_worker_of_the_newer_one",
            "tests/unit/service/supervisor/test_two_supervisors.py::test_the_older_one_commits_and_deletes_nothing",
        ),
    ),
    Order(
        "A copy to the buddy is under way when the next generation begins",
        "it does not count for the new one; the last whole copy stays",
        (
            "tests/unit/workers/engine/state/test_snapshots.py::test_a_send_of_the_last_generation_is_neither_a_cost_nor_a_copy_of_this_one",
            "tests/unit/workers/engine/state/test_snapshots.py::test_a_step_stays_whole_until_every_rank_has_sent_the_same_later_one",
        ),
    ),
    Order(
        "The storage hangs in a save, or a rank hangs while it saves",
        "training goes on, the save is given up",
        (
            "tests/dist/checkpoint/test_hanging_storage.py::test_storage_that_hangs_stops_no_training_and_is_used_again_once_it_answers",
            "tests/unit/service/supervisor/test_executor.py::test_a_commit_that_hangs_is_given_up_and_no_second_thread_is_lost_to_it",
            "tests/unit/service/core/attempt/faults/test_hangs.py::test_a_long_save_is_not_a_hang",
        ),
    ),
    Order(
        "A job sweeps old snapshots that another is about to read",
        "each sweeps only those of its earlier attempts",
        (
            "tests/unit/workers/snapshot_store/slots/test_registry.py::test_another_job_does_not_remove_snapshots_that_a_job_is_about_to_read",
        ),
    ),
    Order(
        "`/dev/shm` of one rank fills up",
        "it is reported, and no rank copies any longer",
        (
            "tests/dist/state/test_lack_of_memory.py::test_a_rank_whose_memory_is_full_says_so_and_no_rank_copies_any_longer",
        ),
    ),
    Order(
        "Memory that is touched in advance meets a limit of the cgroup",
        "limits count; after a kill for memory none is touched in advance",
        (
            "tests/unit/workers/test_machine_limits.py::test_the_limit_of_the_own_group_counts_without_the_files_that_can_be_dropped",
            "tests/unit/service/core/attempt/faults/test_out_of_memory.py::test_after_an_out_of_memory_kill_new_workers_touch_no_memory_in_advance",
        ),
    ),
    Order(
        "A supervisor is restarted after the lease changed hands",
        "the epoch that it obeys does not go back",
        (
            "tests/unit/service/supervisor/test_supervisor.py::test_the_lease_epoch_does_not_go_back_when_the_supervisor_is_restarted",
        ),
    ),
    Order(
        "The wall clock jumps, or the machine was suspended",
        "no deadline, hang, end or lease is affected",
        (
            "tests/unit/service/supervisor/test_clock_jumps.py::test_a_waiting_job_waits_for_its_whole_time_whatever_the_wall_clock_does",
            "tests/unit/service/supervisor/test_clock_jumps.py::test_a_healthy_group_is_not_called_hung_and_books_no_time_that_did_not_pass",
            "tests/unit/service/supervisor/test_clock_jumps.py::test_the_end_of_an_attempt_arrives_if_the_clock_jumps_before_the_tick_that_ends_it",
            "tests/unit/service/control/test_control_loop.py::test_a_clock_that_was_set_back_does_not_keep_the_lease_of_an_owner_that_is_gone",
        ),
    ),
    Order(
        "The storage is away when an attempt starts; the only commit marker is damaged",
        "it is waited for; the job ends with the marker's name",
        (
            "tests/unit/service/supervisor/test_executor.py::test_a_storage_outage_of_seconds_at_the_start_is_waited_for_and_shown",
            "tests/unit/service/core/attempt/group/test_checkpoints.py::test_a_damaged_only_marker_ends_the_job_instead_of_restarting_at_step_0",
        ),
    ),
    Order(
        "Processes with other working directories read a relative checkpoint URL",
        "it is one directory for all, or refused at submit",
        (
            "tests/http/test_checkpoint_url.py::test_a_relative_checkpoint_url_is_one_directory_for_every_process",
            "tests/http/test_checkpoint_url.py::test_the_server_refuses_a_relative_checkpoint_url_and_names_the_way_out",
        ),
    ),
)


def test_there_are_twelve_orders_and_each_has_tests_that_make_test_runs() -> None:
    assert len(ORDERS) == 12 and all(order.tests for order in ORDERS)
    assert failed_cases(_check_test, [name for order in ORDERS for name in order.tests]) == {}


def _check_test(name: str) -> None:
    file, _, function = name.partition("::")
    body = ast.parse((ROOT / file).read_text(encoding="utf-8")).body
    functions = [node for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    tests = [node for node in functions if node.name == function]
    assert tests, f"{name} is not there"
    marks = " ".join(ast.unparse(mark) for mark in tests[0].decorator_list)
    assert not re.search(r"\b(slow|matrix|soak|skip)", marks), f"{name} is not run by make test: {marks}"
