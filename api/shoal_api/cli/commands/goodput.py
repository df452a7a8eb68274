"""`shoal goodput`: how a job's worker-seconds were spent."""

from __future__ import annotations

import time

from shoal_api.cli.session import DEFAULT_URL, JobArgument, JsonFlag, UrlOption, command


def goodput(job: JobArgument, url: UrlOption = DEFAULT_URL, as_json: JsonFlag = False) -> None:
    """Show which share of the workers' time was productive, and how the rest was spent."""
    with command(url, as_json) as session:
        from shoal_api.cli.render.goodput_page import goodput_page
        from shoal_service.views import Goodput

        with session.open_client() as client:
            view = client.job(session.job_id(client, job))
        session.output.document(view.status.goodput or Goodput(), lambda: goodput_page(view, time.time()))
