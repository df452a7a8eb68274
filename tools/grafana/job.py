"""The dashboard of one job: curves, workers, goodput, incidents, state that is kept."""

from __future__ import annotations

from grafana.panel import Board, Look, Panel, Query, one, quantiles

_JOB = '{job_id="$job"}'


def _of(metric: str) -> str:
    return f"max({metric}{_JOB})"


def _query(metric: str, legend: str, needs: str = "") -> Query:
    return Query(_of(metric), legend, needs)


def _ranks(metric: str) -> str:
    return f"max by (rank) ({metric}{_JOB})"


JOB = Board(
    "shoal-job",
    "Shoal: job",
    {
        "Now": (
            one("State", f"max by (state) (shoal_job_state{_JOB}) == 1", "{{state}}", look=Look.NUMBER),
            one("Step", _of("shoal_job_step"), look=Look.NUMBER),
            one("Loss", _of("shoal_job_loss"), look=Look.NUMBER),
            one("Workers", _of("shoal_job_workers"), look=Look.NUMBER),
            one("Goodput", _of("shoal_job_goodput_ratio"), unit="percentunit", look=Look.NUMBER),
            one("Incidents", _of("shoal_job_incidents_total"), look=Look.NUMBER),
            one(
                "Since the newest step",
                f"time() - {_of('shoal_job_step_timestamp_seconds')}",
                unit="s",
                look=Look.NUMBER,
            ),
            one(
                "Since the supervisor's newest report",
                f"time() - {_of('shoal_job_report_timestamp_seconds')}",
                unit="s",
                look=Look.NUMBER,
            ),
            one(
                "Name and layout",
                f"max by (name, layout, priority, project) (shoal_job_info{_JOB})",
                look=Look.TABLE,
            ),
        ),
        "Curves": (
            Panel("Loss", (_query("shoal_job_loss", "training"), _query("shoal_job_validation_loss", "validation"))),
            Panel(
                "Metrics of the task",
                (
                    Query(
                        f"max by (metric, split) (shoal_job_task_metric{_JOB})",
                        "{{metric}} {{split}}",
                        "a task with metrics of its own",
                    ),
                ),
            ),
            one("Gradient norm", _of("shoal_job_gradient_norm"), is_log=True),
            one("Learning rate", _of("shoal_job_learning_rate")),
            Panel("Steps", (_query("shoal_job_step", "done"), _query("shoal_job_total_steps", "to do"))),
        ),
        "Speed": (
            Panel(
                "Throughput",
                (
                    _query("shoal_job_tokens_per_second", "tokens per second"),
                    _query("shoal_job_samples_per_second", "samples per second"),
                ),
                is_log=True,
            ),
            one("Model FLOPs utilisation", _of("shoal_job_mfu_ratio"), unit="percentunit"),
            Panel("Step time", quantiles("shoal_job_step_seconds", where=_JOB), "s"),
            Panel(
                "Where a step's time goes",
                (
                    _query("shoal_job_communication_ratio", "waiting in collectives"),
                    _query("shoal_job_data_wait_ratio", "making batches"),
                    _query("shoal_job_snapshot_share", "snapshots"),
                ),
                "percentunit",
            ),
        ),
        "Workers": (
            Panel(
                "Workers wanted, granted, had",
                (
                    _query("shoal_job_max_workers", "wanted"),
                    _query("shoal_job_desired_workers", "granted"),
                    _query("shoal_job_workers", "had"),
                ),
            ),
            one("CPUs by rank", _ranks("shoal_worker_cpu_cores"), "rank {{rank}}"),
            one("Memory by rank", _ranks("shoal_worker_resident_bytes"), "rank {{rank}}", "bytes"),
            Panel(
                "GPU memory by rank",
                (Query(_ranks("shoal_worker_gpu_used_bytes"), "rank {{rank}}", "a GPU"),),
                "bytes",
            ),
            Panel(
                "GPU use by rank",
                (Query(_ranks("shoal_worker_gpu_busy_ratio"), "rank {{rank}}", "a GPU"),),
                "percentunit",
            ),
            Panel(
                "GPU temperature by rank",
                (Query(_ranks("shoal_worker_gpu_celsius"), "rank {{rank}}", "a GPU"),),
                "celsius",
            ),
            Panel(
                "GPU power by rank",
                (Query(_ranks("shoal_worker_gpu_watts"), "rank {{rank}}", "a GPU"),),
                "watt",
            ),
            one("Not waiting for other ranks", _ranks("shoal_worker_busy_ratio"), "rank {{rank}}", "percentunit"),
            one("Step time by phase", f"max by (phase) (shoal_job_phase_ratio{_JOB})", "{{phase}}", "percentunit"),
            Panel(
                "Network and disk by rank",
                (
                    Query(_ranks("shoal_worker_received_bytes_per_second"), "received, rank {{rank}}"),
                    Query(_ranks("shoal_worker_sent_bytes_per_second"), "sent, rank {{rank}}"),
                    Query(_ranks("shoal_worker_disk_read_bytes_per_second"), "read, rank {{rank}}"),
                    Query(_ranks("shoal_worker_disk_written_bytes_per_second"), "written, rank {{rank}}"),
                ),
                "Bps",
            ),
            one("Nodes", f"max by (rank, node_id) (shoal_worker_info{_JOB})", look=Look.TABLE),
        ),
        "Goodput and incidents": (
            one(
                "Worker-seconds by category",
                f"max by (category) (shoal_job_goodput_seconds{_JOB})",
                "{{category}}",
                "s",
                look=Look.STACKED,
            ),
            one(
                "Worker-seconds of recoveries by cause",
                f"max by (cause) (shoal_job_recovering_seconds{_JOB})",
                "{{cause}}",
                "s",
                look=Look.STACKED,
            ),
            Panel(
                "Incidents, attempts, steps lost",
                (
                    _query("shoal_job_incidents_total", "incidents"),
                    _query("shoal_job_attempts_total", "attempts"),
                    _query("shoal_job_steps_lost_total", "steps lost"),
                    _query("shoal_job_refused_calls_total", "refused calls"),
                ),
            ),
        ),
        "Islands": (
            Panel(
                "Rounds",
                (
                    _query("shoal_job_island_rounds_total", "closed", "an island"),
                    _query("shoal_job_island_rounds_missed", "missed in a row", "an island"),
                ),
            ),
            Panel("Waited for rounds", (_query("shoal_job_island_waited_seconds", "waited", "an island"),), "s"),
        ),
        "State that is kept": (
            Panel(
                "What a lost node would cost",
                (
                    _query("shoal_job_node_loss_steps", "now"),
                    _query("shoal_job_node_loss_max_steps", "at most", "a bound in steps"),
                ),
                help="Completed steps that would be repeated.",
            ),
            one("Steps between snapshots", _of("shoal_job_snapshot_every_steps")),
            Panel(
                "Healthy",
                (
                    _query("shoal_job_snapshots_healthy", "snapshots"),
                    _query("shoal_job_checkpoint_healthy", "checkpoints"),
                ),
            ),
            Panel(
                "Newest checkpoint",
                (
                    Query(f"time() - {_of('shoal_job_checkpoint_timestamp_seconds')}", "age"),
                    _query("shoal_job_checkpoint_last_seconds", "duration"),
                ),
                "s",
            ),
            one("Step of the newest checkpoint", _of("shoal_job_checkpoint_step")),
            one("Size of the newest checkpoint", _of("shoal_checkpoint_bytes"), unit="bytes"),
            one("Time since its first start", f"time() - {_of('shoal_job_start_timestamp_seconds')}", unit="s"),
        ),
    },
    has_job=True,
)
