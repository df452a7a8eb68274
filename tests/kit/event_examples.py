"""An example of each event type, with the line that people read."""

from shoal_service.core.desired import Desired
from shoal_service.core.events import job, service, training, workers
from shoal_service.core.events.base import JobEvent
from shoal_workers.contract.job import IncidentCause, JobState, StateSource
from shoal_workers.contract.messages import Stacks
from shoal_workers.contract.suspects import Resource, Suspect

_OLD_CODE = "6b86b273ff34fce19d6b804eff5a3f5747ada4eaa22f1d49c01e52ddb7875b4b"
_NEW_CODE = "5feceb66ffc86f38d952786c6d696c79c2dbc239dd4e91b46729d73a27fb57e9"
W = "job-x/1/3"
"""A worker."""

EXAMPLES: list[tuple[JobEvent, str]] = [
    (job.JobCreated(name="lm", spec_version=1), "job created as lm"),
    (
        job.JobStateChanged(from_=JobState.RUNNING, to=JobState.PAUSED, reason="paused", message="Paused on request."),
        "job RUNNING -> PAUSED (paused): Paused on request.",
    ),
    (job.JobRequested(desired=Desired.PAUSE), "a user asked to pause the job"),
    (
        job.JobQuarantined(message="stop.steps is -1"),
        "job quarantined: stop.steps is -1",
    ),
    (
        job.JobExtended(spec_version=2, steps=200, done=120, reopened=True),
        "extended to 200 steps, 120 done, goes on in place",
    ),
    (
        training.AlertRaised(condition="max(grad_norm) > 100", step=70, values={"max(grad_norm)": 900.0}),
        "alert: max(grad_norm) > 100 since step 70 (max(grad_norm) 900)",
    ),
    (
        training.StoppedEarly(step=80, reason="validation loss did not improve"),
        "stops early after step 80: validation loss did not improve",
    ),
    (
        training.ValidationNotJudged(step=20, metric="f1", known=("accuracy",)),
        "validation after step 20 has no finite f1 (validation.metric), so it counts neither for the best checkpoints "
        "nor for patience; it has loss, accuracy",
    ),
    (
        training.IslandMissedRound(round=7, island=2, members=(0, 1)),
        "island 2 missed round 7: it was closed with 0, 1",
    ),
    (
        job.JobRetried(done=40, reason="user_error"),
        "tried again after user_error at step 40",
    ),
    (job.JobArchived(archived=True, by="ada"), "archived: lists leave it out"),
    (
        training.GenerationData(generation=1, step=60, before="1f0c", now="77ab"),
        "from step 61 on with other data than the checkpoint (1f0c -> 77ab)",
    ),
    (
        job.CodeUpdating(version=_NEW_CODE, before=_OLD_CODE),
        "workers with code 5feceb66ffc8 start beside those that train with 6b86b273ff34",
    ),
    (
        job.CodeUpdated(version=_NEW_CODE, before=_OLD_CODE, step=12, pause_s=0.314, step_s=0.1, step_s_before=0.1),
        "code 5feceb66ffc8 trains since step 13, after a pause of 0.31 s",
    ),
    (
        job.CodeRolledBack(version=_NEW_CODE, before=_OLD_CODE, step=12, reason="ValueError: no"),
        "code 5feceb66ffc8 is rolled back, and 6b86b273ff34 goes on from step 12: ValueError: no",
    ),
    (
        job.CodeRefused(version=_NEW_CODE, before="", reason="a worker could not load it"),
        "code 5feceb66ffc8 is refused, and the code before trains on: a worker could not load it",
    ),
    (
        training.GenerationSettings(
            generation=2, step=60, changes=("stop.steps 120 -> 200", "optimizer.lr 0.1 -> 0.01")
        ),
        "from step 61 on: stop.steps 120 -> 200, optimizer.lr 0.1 -> 0.01",
    ),
    (
        job.JobPatched(spec_version=2, elasticity={"max_workers": 3}, priority=4, labels={"draft": None}),
        "spec changed to version 2: elasticity, priority, labels",
    ),
    (
        job.JobPatched(spec_version=3, weights={"web": 0.5, "chats": 0.5}, at_step=40),
        "spec changed to version 3: weights from step 40 on",
    ),
    (
        job.JobMoveRequested(from_="any", to="west", spec_version=2, running_in="default", by="anna"),
        "anna moves the job to cluster west from default",
    ),
    (job.JobMoveRequested(from_="any", to="west", spec_version=2), "a user moves the job to cluster west"),
    (
        job.JobMoveRequested(from_="any", to="west", spec_version=2, running_in="west"),
        "a user keeps the job in cluster west",
    ),
    (
        job.JobMoveRequested(from_="west", to="any", spec_version=3),
        "a user lets the job run in any cluster (before: west)",
    ),
    (
        job.JobStaysInCluster(cluster="west", reason="no other cluster answers"),
        "stays in cluster west: no other cluster answers",
    ),
    (
        job.JobPreempted(workers=2, beneficiary="job-y", reason="priority 50 before 0."),
        "preempted, gives 2 workers to job-y: priority 50 before 0.",
    ),
    (
        job.JobOutperformed(sweep="lr", measure="validation loss", step=75, value=3.2, median=2.9, num_others=4),
        "pruned from sweep lr: its validation loss at step 75 is 3.2, worse than 2.9, the median of 4 other jobs",
    ),
    (
        job.JobHeldBack(workers=2, max_workers=4, limit="pause_costs_more", reason="It ends in about 3.0 s."),
        "stays at 2 of 4 workers: It ends in about 3.0 s.",
    ),
    (job.JobGranted(from_=2, to=1, reason="shared with job-y"), "granted 1 worker (before: 2): shared with job-y"),
    (job.JobPruned(what="logs", rows=3, reason="it is old"), "logs deleted (3 rows): it is old"),
    (job.JobWaiting(warm=1, min_workers=2, until=9.0), "waiting for workers: 1 warm, at least 2 needed"),
    (
        job.JobWaiting(warm=4, min_workers=2, until=9.0, reason="n1 has 1 GiB of memory, and 4 workers need 2 GiB"),
        "waiting for workers on other nodes: n1 has 1 GiB of memory, and 4 workers need 2 GiB",
    ),
    (workers.WorkerStarted(worker_id=W, node_id="n", node_ip="10.0.0.1", pid=7), "worker 3 started (pid 7)"),
    (
        workers.WorkerStartFailed(worker_id=W, error="ImportError: no torchvision"),
        "worker 3 could not load the task: ImportError: no torchvision",
    ),
    (
        workers.WorkerLost(worker_id=W, rank=2, cause=IncidentCause.WORKER_DIED, message="SIGKILL"),
        "worker 3 (rank 2) lost: worker_died, SIGKILL",
    ),
    (
        workers.WorkerExited(worker_id=W, message="process 7 on 10.0.0.1 exited with 3"),
        "worker 3: process 7 on 10.0.0.1 exited with 3",
    ),
    (training.CheckpointDeleted(name="step-5", step=5), "checkpoint of step 5 deleted on request"),
    (job.ProfileRequested(number=2, rank=0, steps=3), "profile 2 requested: rank 0, 3 steps"),
    (
        job.ProfileTaken(number=2, rank=0, first_step=41, last_step=43, step_s=0.12, held_s=0.05),
        "profile 2 of rank 0 taken: steps 41 to 43, 120 ms each; training was held up for 50 ms",
    ),
    (job.ProfileFailed(number=2, rank=0, reason="no group"), "profile 2 of rank 0 failed: no group"),
    (
        workers.StragglerFound(
            worker_id=W, rank=3, node_id="n", compute_s=1.0, median_s=0.2, step=9, action="an extra worker is started"
        ),
        "worker 3 (rank 3) is slow: 1.0 s per step, the others 200 ms; an extra worker is started",
    ),
    (
        workers.StacksTaken(
            stacks=Stacks(at=0.0, generation=1, reason="rank 3 is slow", clusters=(), summary="rank 3 is idle")
        ),
        "stacks (rank 3 is slow): rank 3 is idle",
    ),
    (
        workers.WarmMemoryOff(worker_id=W, message="was killed by the kernel: out of memory"),
        "worker 3: was killed by the kernel: out of memory; new workers touch no memory in advance any more",
    ),
    (
        workers.StepsSlow(
            step=70,
            usual_s=0.12,
            now_s=0.52,
            suspect=Suspect(
                resource=Resource.CPU,
                ranks=(1,),
                evidence=("rank 1 works 500 ms a step; for 390 ms it is ready to run and has no CPU",),
            ),
        ),
        "steps take 520 ms instead of 120 ms; suspected: rank 1 (cpu): rank 1 works 500 ms a step; for 390 ms it is "
        "ready to run and has no CPU",
    ),
    (
        workers.StragglerKept(worker_id=W, rank=3, message="no other worker became warm within 60 s"),
        "worker 3 (rank 3) is slow but stays: no other worker became warm within 60 s",
    ),
    (
        workers.WorkerLeaving(worker_id=W, rank=None, reason="SIGTERM", grace_s=30.0),
        "worker 3 will be gone in 30 s: SIGTERM",
    ),
    (
        workers.NodeSilent(
            node_id="ab12", node_ip="10.0.0.1", workers=2, ranks=(1,), message="no answer to 5 connects"
        ),
        "node ab12 (10.0.0.1) is silent, 2 workers left out until it answers: no answer to 5 connects",
    ),
    (workers.NodeAnswers(node_id="ab12", silent_s=4.0), "node ab12 answers again after 4.0 s"),
    (
        workers.WorkerReleased(worker_id=W, reason="more workers than granted"),
        "worker 3 released: more workers than granted",
    ),
    (
        training.GenerationForming(
            generation=2, workers=3, layout="fsdp3", reason="", source=StateSource.MEMORY, restore="step-40", step=41
        ),
        "forming generation 2 with 3 workers, from the snapshot of step 41 in memory",
    ),
    (
        training.GenerationFormed(
            generation=2,
            workers=3,
            start_step=20,
            steps_lost=0,
            form_s=0.1,
            build_s=0.1,
            restore_s=0.1,
            num_parameters=10,
            layout="fsdp3",
        ),
        "generation 2: 3 workers as fsdp3, from step 20",
    ),
    (
        training.LayoutProven(layout="tp2", outcome="proven", difference=6e-7, seconds=0.84, cached=False),
        "layout tp2 is proven, in 0.8 s: largest difference 6e-07",
    ),
    (
        training.LayoutRefused(layout="cp2", message="the layout cp2 trains another model"),
        "layout refused: the layout cp2 trains another model",
    ),
    (
        training.LayoutMeasured(shard="gradients", step_s={"optimizer": 0.5, "gradients": 0.452}),
        "shard level gradients stays: a step takes optimizer 0.5 s, gradients 0.452 s",
    ),
    (
        training.GenerationSwitching(generation=2, reason="grow 2 -> 3", durable=False),
        "switching at the next step boundary: grow 2 -> 3",
    ),
    (
        training.SwitchLossy(message="a part was lost", restore="step-40", step=40),
        "the next group goes on from step 40 and computes the steps after it again: a part was lost",
    ),
    (
        training.NonFiniteStepSkipped(step=6, loss=None, grad_norm=None),
        "step 6 skipped: its loss or gradient norm was not finite",
    ),
    (
        training.NonFiniteStepRolledBack(step=7, to=4, message="loss is nan"),
        "back to step 4, and step 7 is left out: loss is nan",
    ),
    (
        training.Validated(step=9, loss=2.0, bits_per_byte=2.9),
        "validation after step 9: loss 2.0000, 2.900 bits per byte",
    ),
    (
        workers.IncidentOpened(
            id=1,
            cause=IncidentCause.WORKER_DIED,
            witness="ray",
            ranks=(2,),
            message="SIGKILL",
            generation=1,
            workers=4,
            step=9,
        ),
        "incident worker_died of rank 2: SIGKILL",
    ),
    (
        workers.SnapshotsRecovering(nodes=("n1", "n2"), steps=5, until=9.0),
        "workers are started on 2 nodes to read the snapshots in memory there, which may save 5 steps",
    ),
    (
        workers.SnapshotsLacking(generation=2, step=5, rank=1, only_copies=False, message="no space left"),
        "rank 1 keeps no more snapshots in memory: no space left",
    ),
    (
        workers.IncidentSuspected(
            id=1,
            suspect=Suspect(resource=Resource.PROCESS, ranks=(1,), evidence=("rank 1 is stopped by a signal",)),
        ),
        "incident 1, suspected: rank 1 (process): rank 1 is stopped by a signal",
    ),
    (
        workers.IncidentClosed(
            id=1,
            cause=IncidentCause.WORKER_DIED,
            action="re-formed",
            detect_s=0.03,
            recovery_s=1.5,
            steps_lost=1,
            from_workers=4,
            to_workers=3,
            state_source=StateSource.MEMORY,
            bytes_moved=None,
        ),
        "incident worker_died closed: 4 -> 3 workers, detected in 30 ms, recovered in 1.5 s, 1 step lost, "
        "state from memory",
    ),
    (training.CheckpointCommitted(name="step-20", step=20, generation=1), "checkpoint of step 20 committed"),
    (training.CheckpointFailed(message="disk full", rank=1), "a checkpoint could not be written: rank 1: disk full"),
    (
        training.CheckpointRetried(message="disk full", number=1, of=4, after_s=2.0),
        "the final state could not be saved; try 1 of 4 follows in 2.0 s: disk full",
    ),
    (
        training.CheckpointDamaged(name="step-20", message="crc32 differs"),
        "checkpoint step-20 is damaged: crc32 differs",
    ),
    (
        training.StorageAway(message="timed out", until=9.0),
        "the checkpoint storage is away; it is asked again: timed out",
    ),
    (training.CheckpointFallback(to=None), "no older checkpoint: training starts again"),
    (training.CheckpointRetentionFailed(message="denied"), "old checkpoints could not be deleted: denied"),
    (
        training.CheckpointPinned(name="step-000000000010-a1-g1", step=10),
        "checkpoint of step 10 pinned: retention does not delete it",
    ),
    (
        training.CheckpointUnpinned(name="step-000000000010-a1-g1", step=10),
        "checkpoint of step 10 is no longer pinned: retention may delete it",
    ),
    (
        service.SupervisorRekeyed(message="the token of the attempt is not in the database"),
        "supervisor restarted with a new token: the token of the attempt is not in the database",
    ),
    (service.JournalDamaged(lost=3), "the supervisor's journal is damaged: 3 changes lost, it continues from before"),
    (service.SupervisorMoved(node_id="ab12"), "supervisor moved: its host, node ab12, does not answer"),
    (
        service.DriverFailed(number=2, after_s=2.0, message="error 2 of at most 8 in a row: KeyError"),
        "the control plane could not drive the attempt, next try in 2.0 s: error 2 of at most 8 in a row: KeyError",
    ),
    (
        service.SupervisorStartFailed(number=2, after_s=2.0, message="start 2 of at most 5 failed: the actor died"),
        "supervisor not started, next start in 2.0 s: start 2 of at most 5 failed: the actor died",
    ),
    (service.SupervisorRestarted(found=3, of=4), "supervisor restarted: reattached to 3 of 4 workers"),
    (service.NodeSuspected(node_id="ab12", reason="it hung"), "node ab12 is suspected: it hung"),
    (
        service.NodeCordoned(node_id="ab12", reason="bad fan"),
        "node ab12 is cordoned: bad fan; its workers stay, and none is added",
    ),
    (
        service.WebhookGaveUp(
            hook="job/0",
            receiver="https://example.org",
            num_events=2,
            first_seq=3,
            last_seq=7,
            failing_s=86_400.0,
            error="has answered 500",
        ),
        "webhook job/0: 2 events given up after 24 h 00 min: https://example.org has answered 500",
    ),
    (
        service.MetricsHookFailed(hook="m:hook", message="TimeoutError", num_waiting=3, num_dropped=0),
        "metrics hook m:hook logs nothing, 3 points waiting: TimeoutError; the job's log has what it printed",
    ),
    (
        service.NodeCleared(node_id="ab12", suspected_s=62.0, reason="it hung"),
        "node ab12 has passed its test after 62 s",
    ),
]
