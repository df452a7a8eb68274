"""Resolves JOB on the command line: an id, a unique beginning of an id, or a unique name. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from shoal_api.cli.errors import CliError
from shoal_api.cli.exit_codes import ExitCode
from shoal_service.core.quantities import count_text
from shoal_service.views import JobSummary

_SHOWN = 5


def match_job(reference: str, jobs: Iterable[JobSummary]) -> JobSummary:
    """The job that `reference` names. An exact id has priority over a name, and a name over the beginning of an id. Of
    several jobs of one name, the only one that has not ended is meant.

    Raises CliError if no job matches (exit code 4) or several do (exit code 2); the error lists them.
    """
    known = list(jobs)
    for candidates in (
        [job for job in known if job.id == reference],
        [job for job in known if job.name == reference],
        [job for job in known if reference and job.id.startswith(reference)],
    ):
        going_on = [job for job in candidates if not job.state.ended]
        if len(candidates) == 1 or len(going_on) == 1:
            return (candidates if len(candidates) == 1 else going_on)[0]
        if candidates:
            raise _ambiguous(reference, candidates)
    near = difflib.get_close_matches(reference, [job.name for job in known], n=1)
    raise CliError(
        f"there is no job {reference!r}",
        hint=(f"did you mean {near[0]!r}? " if near else "") + "`shoal jobs` lists them",
        exit_code=ExitCode.NOT_FOUND,
    )


def _ambiguous(reference: str, candidates: list[JobSummary]) -> CliError:
    newest = sorted(candidates, key=lambda job: job.created_at, reverse=True)
    more = len(newest) - _SHOWN
    return CliError(
        f"{reference!r} matches {count_text(len(newest), 'job')}",
        details=(
            *(f"{job.id}  {job.name}  {job.state}" for job in newest[:_SHOWN]),
            *((f"... and {more} more",) if more > 0 else ()),
        ),
        hint="give an id; the first one listed is the newest",
    )
