// What a user can do about a job that has failed, by the reason of its end. Pure. A test holds that each reason of
// service/shoal_service/core/endings.py which fails a job is here.
const WAYS = {
  user_error: "Fix the code and submit it again. Retry and Run again reuse this job's code.",
  non_finite: "Run again with a lower optimizer.lr, a smaller optimizer.clip_norm, or health.non_finite: roll_back.",
  capacity_timeout:
    "Run again with a lower elasticity.min_workers or a longer elasticity.wait_s, or Retry when there is room: the page Fleet shows what holds it.",
  recovery_budget:
    "Look at the incidents for what kills the workers. Retry goes on with a new budget; retry.max_recoveries sets it.",
  storage_failed: "Make checkpoint.url readable and writable again, then Retry.",
  checkpoints_missing:
    "Make the job's checkpoints available again under checkpoint.url, then Retry. To go on from what is there: shoal take JOB STEP, then Retry.",
  validation_failed: "The last checkpoint is whole: Export it. Retry validates again.",
  damaged_checkpoint: "Verify in the tab Checkpoints says what is damaged. Run again begins with the first step.",
  start_failed: "The events say what did not start. Retry when that is fixed.",
  workers_failed:
    "If memory was short, Run again with a smaller batch.micro_size or more elasticity.min_workers. If a node is at fault, drain it, then Retry.",
  server_stopped: "Retry: the job is not at fault.",
  preempted: "Retry: the job is not at fault.",
  moved: "Retry: the job is not at fault.",
  cluster_lost: "Retry when the cluster is back: the job is not at fault.",
  supervisor_lost: "Retry: the job is not at fault.",
  internal: "Retry, and please report it with the log.",
};

// Empty: the job has not failed.
export const wayOut = ({ state, reason }) =>
  state === "FAILED" ? (WAYS[reason] ?? "Retry if the cause is gone.") : "";
