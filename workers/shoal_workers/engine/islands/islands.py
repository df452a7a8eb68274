"""One rank's side of the rounds of its island: ends them, writes differences, reads what others have written, waits at
most for `islands.grace_s`, and says what the next update takes.

    step s        the last of a round: the update notes the weights, then the difference is written in the background
    from then on  a thread looks for the decision of the round, and reads the members' differences
    step s + d    the first whose update may take the round: it does if no rank lacks it (the vote), else a later one

`islands.grace_s` is waited for once in a round; after it the island trains on, and takes the round whenever every rank
has it. An island that has missed rounds takes them one after the other, and so comes to the same outer weights.

Round and steps are settings of the optimizer's groups, so that snapshots and checkpoints have them.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, fields, replace

from torch import Tensor

from shoal_workers.checkpoint.errors import CheckpointError
from shoal_workers.checkpoint.storage import open_directory
from shoal_workers.checkpoint.writer import CheckpointWriter
from shoal_workers.contract.islands import (
    DECISION,
    FOLDER,
    Announcement,
    IslandsSpec,
    RoundDecision,
    announcement_file,
    round_folder,
)
from shoal_workers.contract.marker import CheckpointName
from shoal_workers.contract.worker_reports import SavedPart, SaveFailed
from shoal_workers.engine.islands.differences import Part, encode, parts_of, read_round
from shoal_workers.engine.model.runtime import ModelRuntime
from shoal_workers.engine.step.generation import Generation
from shoal_workers.engine.step.merging import PROGRESS, Landing, Merging
from shoal_workers.engine.step.parameter_groups import NoParameters

_POLL_S = 0.25
_IDLE_POLL_S = 2.0
"""While nothing is sent: only an island that is behind finds a closed round then."""
_SLICE_S = 0.05
_RESEND_S = 5.0
"""From a failed write to the next try."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far an island is, after some step."""

    round: int = 0
    """The round that it takes next; all before it are in its outer weights."""
    sent_step: int = 0
    """The step whose weights were sent to this round; 0: none yet."""
    counted_step: int = 0
    """Steps whose samples were counted in rounds."""
    sent_loss: float = 0.0
    """Sum of the losses from there to `sent_step`."""
    num_sent: int = 0
    """The steps of this sum: those that were not skipped."""
    loss: float = 0.0
    """The sum of the losses since then."""
    num_losses: int = 0

    def ends_with(self, step: int, spec: IslandsSpec, num_left: int) -> bool:
        """Return whether a round ends with this step: when it is long enough and lands before the last one ends, and so
        that the last one lands in the last step of the job."""
        if self.sent_step or not num_left:
            return False
        is_due = step - self.counted_step >= spec.round_steps and num_left >= 2 * spec.lands_after_steps
        return is_due or num_left <= spec.lands_after_steps

    def lands_in(self, step: int, spec: IslandsSpec, num_left: int) -> bool:
        """Return whether the round that has ended may land in this step."""
        return not num_left or step >= self.sent_step + spec.lands_after_steps

    def after_step(self, loss: float) -> Progress:
        return replace(self, loss=self.loss + loss, num_losses=self.num_losses + 1)

    def after_end(self, step: int, round_: int) -> Progress:
        """`round_`: the one to which the weights after `step` are sent."""
        return Progress(round_, step, self.counted_step, self.loss, self.num_losses)

    def after_landing(self, own_step: int | None) -> Progress:
        """`own_step`: the step whose weights of this island the round has; None: it is no member."""
        if own_step is not None:
            return Progress(self.round + 1, 0, own_step, loss=self.loss, num_losses=self.num_losses)
        loss, num_losses = self.loss + self.sent_loss, self.num_losses + self.num_sent
        return Progress(self.round + 1, 0, self.counted_step, loss=loss, num_losses=num_losses)


@dataclass(frozen=True, slots=True)
class _Round:
    """A closed round that this rank has read."""

    number: int
    means: dict[Tensor, Tensor]
    own: dict[Tensor, Tensor] | None
    own_step: int | None
    """The step of this island whose difference is a member. If the island has gone back behind it since, it has not
    come to this step again, or has ended the round with another one."""


class Islands:
    """The rounds of one generation on one rank. Training thread only, but for `_read`."""

    def __init__(
        self, generation: Generation, runtime: ModelRuntime, spec: IslandsSpec, job_root: str, num_steps: int
    ) -> None:
        """
        Args:
            job_root: URL of this job's directory, beside that of island 0.
            num_steps: of the whole job.
        """
        assert spec.index is not None and spec.run is not None, "the service sets both"
        optimizer = runtime.update.optimizer
        assert isinstance(optimizer, (Merging, NoParameters))
        self._generation, self._runtime, self._spec = generation, runtime, spec
        self._index, self._num_steps = spec.index, num_steps
        self._optimizer = optimizer
        self._root = f"{job_root.rstrip('/').rpartition('/')[0]}/{spec.run}/{FOLDER}"
        self._writer, self._num_writing = CheckpointWriter(), 0
        self._changed = threading.Condition()
        self._round: _Round | None = None
        self._wanted: tuple[int, list[Part]] | None = None
        """The round that is to be read, and into what; None ends the thread."""
        self._reader: threading.Thread | None = None
        self._waited_s = 0.0
        self._patience_s = spec.grace_s
        """What is left of the grace of this round."""
        self._sent: tuple[Progress, dict[str, Tensor]] | None = None
        """What was sent last, until its round lands."""
        self._landed = self._ends = False
        """What this update does."""
        self._resend_mono: float | None = None
        """When it is to be written again; None: it is not."""

    def begin(self) -> None:
        """Called on all ranks after a restore: what was sent before may not have been written whole."""
        if self._progress.sent_step:
            self._send(self._progress)

    @property
    def _progress(self) -> Progress:
        settings = self._optimizer.param_groups[0]
        progress = Progress(*(settings.get(f"{PROGRESS}{field.name}", field.default) for field in fields(Progress)))
        if progress.sent_step:  # to this very round, also if `stop.steps` has made it one of others since
            return progress
        return replace(progress, round=self._spec.next_round(progress.round, self._num_steps))

    def _note(self, progress: Progress) -> None:
        for group in self._optimizer.param_groups:
            group |= {f"{PROGRESS}{field.name}": getattr(progress, field.name) for field in fields(Progress)}

    def lacks_round(self, step: int, num_left: int) -> bool:
        """Return whether the update after `step` steps cannot take a round here. Waits for one that is due.
        `num_left`: steps of the job after this one."""
        progress = self._progress
        if isinstance(self._optimizer, Merging) and not self._optimizer.has_begun:
            return True
        if not num_left:
            self._patience_s = self._spec.grace_s
        self._want(progress.round)
        self._write_again()
        if progress.sent_step and progress.lands_in(step + 1, self._spec, num_left):
            self._wait(progress.round)
        with self._changed:
            if self._round is None or self._round.number != progress.round:
                return True
            own_step = self._round.own_step
        # A round without this island lands at once: one that comes back has many to take. An island that has gone back
        # trains up to what it has sent before, else that would count twice.
        return own_step is not None and not replace(progress, sent_step=own_step).lands_in(
            step + 1, self._spec, num_left
        )

    def begin_update(self, step: int, num_left: int, loss: float, *, lands: bool) -> None:
        """Say what the update after `step` steps does. `loss`: that of its step. `lands`: no rank lacks the round."""
        landing, first_of_all = None, self._spec.first_of_all(self._num_steps)
        progress = self._progress.after_step(loss)
        if lands:
            assert self._round is not None
            landing = Landing(
                self._round.means,
                self._round.own,
                self._spec.outer,
                "none" if self._spec.topology == "all" else "pair" if progress.round < first_of_all else "all",
                is_repeated=self._round.own_step not in (None, progress.sent_step),
            )
            progress = progress.after_landing(self._round.own_step)
            self._patience_s, self._sent = self._spec.grace_s, None
            self._generation.say(f"round {self._round.number} has landed in step {step + 1}")
        ends = progress.ends_with(step + 1, self._spec, num_left)
        is_counted = progress.counted_step > 0 and progress.round > first_of_all
        is_last = not num_left and not progress.sent_step and is_counted
        if not num_left and not is_last:
            self._generation.say(
                f"round {progress.round} is open at the end: the last weights are those of this island alone"
            )
        if is_last and step + 1 - progress.counted_step > self._spec.lands_after_steps:
            self._generation.say(
                f"the last weights are those of round {progress.round - 1}, to which this island has sent its step "
                f"{progress.counted_step}: what it has trained since then is not in them"
            )
        self._landed, self._ends = landing is not None, ends
        if isinstance(self._optimizer, Merging):
            self._optimizer.landing, self._optimizer.ends_round, self._optimizer.is_last = landing, ends, is_last
        if ends:
            # The last round of an island is one of all, whatever pairs it has missed.
            least = first_of_all if num_left <= self._spec.lands_after_steps else 0
            progress = progress.after_end(step + 1, max(progress.round, least))
        self._note(progress)

    def end_update(self) -> None:
        """Send the difference if the round has ended."""
        if self._landed:
            with self._changed:
                self._round = None
        if isinstance(self._optimizer, Merging):
            self._optimizer.landing, self._optimizer.ends_round, self._optimizer.is_last = None, False, False
        if self._ends:
            self._send(self._progress)

    def skip_update(self, num_left: int) -> None:
        """Called in place of the other two for a step without an update."""
        if not num_left:
            self._generation.say("the last step was skipped: the last weights are those of this island alone")

    def close(self) -> None:
        with self._changed:
            self._wanted = None
            self._changed.notify_all()
        if self._reader is not None:
            self._reader.join(timeout=_SLICE_S)

    def _send(self, progress: Progress) -> None:
        """Make this rank's part of the difference, and write it. All ranks together."""
        parts = self._parts(progress.round)
        self._sent = progress, encode(parts, self._spec, self._generation, self._runtime.trained)
        self._write(*self._sent)

    def _write_again(self) -> None:
        """Write what was sent once more, if that has failed some time ago, or hangs."""
        with self._changed:
            is_due = self._resend_mono is not None and time.monotonic() >= self._resend_mono
        if is_due and self._sent is not None:
            self._write(*self._sent)

    def _write(self, progress: Progress, written: dict[str, Tensor]) -> None:
        """Stage it, and write it in the background; not to a round that is closed."""
        if self._has(progress.round):
            return
        generation = self._generation
        assignment, spec = generation.assignment, generation.spec
        name = CheckpointName(progress.sent_step, assignment.attempt, assignment.generation)
        directory = f"{self._root}/{round_folder(progress.round)}/island-{self._index}/{name}"
        num_steps = progress.sent_step - progress.counted_step
        tokens = num_steps * spec.batch.global_size * generation.task.tokens_per_sample

        def announce(outcome: SavedPart | SaveFailed) -> None:
            error = outcome.error if isinstance(outcome, SaveFailed) else ""
            if isinstance(outcome, SavedPart):
                announcement = Announcement(
                    round=progress.round,
                    island=self._index,
                    islands=self._spec.find_islands(progress.round, self._num_steps),
                    from_step=progress.counted_step,
                    tokens=tokens,
                    loss=progress.sent_loss / progress.num_sent if progress.num_sent else None,
                    waited_s=self._waited_s,
                    part=outcome,
                )
                try:
                    text = announcement.model_dump_json().encode()
                    open_directory(directory).write(announcement_file(assignment.rank), [text])
                except OSError as failure:
                    error = str(failure)
            if error:
                generation.outbox.log_text(f"round {progress.round} was not written, and is written again: {error}")
            with self._changed:
                self._num_writing -= 1
                self._resend_mono = time.monotonic() + _RESEND_S if error else None

        with self._changed:
            is_stalled, self._num_writing = self._num_writing > 0, self._num_writing + 1
            self._resend_mono = time.monotonic() + spec.timeouts.save_s
            self._changed.notify_all()  # from now on the round is awaited
        if is_stalled:
            self._writer.abandon()  # the storage hangs, and must not hold the training
        is_sparse = self._spec.compress == "sparse"  # its tensors have the rank in their names
        self._writer.save(
            written,
            directory=directory,
            rank=assignment.rank,
            world_size=assignment.world_size,
            owns_replicated=is_sparse or assignment.layout.owns_replicated(assignment.rank),
            generation=assignment.generation,
            step=progress.sent_step,
            extra={},
            on_done=announce,
        )

    def _parts(self, number: int) -> list[Part]:
        num = self._spec.fragments
        return parts_of(self._runtime.update, self._runtime.trained, number % num, num)

    def _want(self, number: int) -> None:
        with self._changed:
            if self._wanted is None or self._wanted[0] != number:
                self._wanted = number, self._parts(number)
                self._changed.notify_all()
        if self._reader is None:
            self._reader = threading.Thread(target=self._read, name="shoal-islands", daemon=True)
            self._reader.start()

    def _wait(self, number: int) -> None:
        begun = time.monotonic()
        until = begun + self._patience_s
        while not self._has(number) and time.monotonic() < until:
            self._generation.check()
            self._write_again()
            with self._changed:
                if self._changed.wait_for(lambda: self._has(number), timeout=_SLICE_S):
                    break
            # Progress, so that it is not taken for a hang.
            self._generation.position.note(
                f"waiting for round {number} of the islands: {time.monotonic() - begun:.1f} s"
            )
        waited_s = time.monotonic() - begun
        self._waited_s += waited_s
        if self._patience_s and waited_s >= self._patience_s:
            self._generation.say(
                f"round {number} is open after {self._spec.grace_s:g} s (islands.grace_s); training goes on"
            )
        self._patience_s = max(0.0, self._patience_s - waited_s)

    def _has(self, number: int) -> bool:
        return self._round is not None and self._round.number == number

    def _read(self) -> None:
        """Runs on a thread of its own."""
        error_said = ""
        while True:
            with self._changed:
                wanted = self._wanted
                if wanted is None:
                    return
                if self._has(wanted[0]):
                    self._changed.wait()
                    continue
            number, parts = wanted
            folder = f"{self._root}/{round_folder(number)}"
            try:
                decision = RoundDecision.model_validate_json(open_directory(folder).read(DECISION))
                means, own = read_round(parts, self._spec, decision, folder, self._runtime.trained)
                own_step = next((member.step for member in decision.members if member.island == self._index), None)
            except FileNotFoundError:
                self._pause()
                continue
            except (OSError, CheckpointError, ValueError, RuntimeError) as error:  # the last: out of memory
                if str(error) != error_said:
                    error_said = str(error)
                    self._generation.outbox.log_text(f"round {number} could not be read: {error}")
                self._pause()
                continue
            with self._changed:
                self._round = _Round(number, means, own, own_step)
                self._changed.notify_all()

    def _pause(self) -> None:
        with self._changed:
            self._changed.wait(_IDLE_POLL_S if self._sent is None else _POLL_S)
