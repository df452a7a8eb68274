"""Labels and words to search for as conditions of SQL, for the list of jobs and for the overview."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sqlalchemy import Select, or_, select

from shoal_service.core.selection import LabelSelector, search_words
from shoal_service.store.tables import job_labels, jobs

_SEARCHED = (jobs.c.name, jobs.c.id, jobs.c.project, jobs.c.user)


def selected(query: Select[Any], labels: Collection[LabelSelector], search: str) -> Select[Any]:
    """Only the jobs that all of `labels` match, and that have every word of `search`."""
    for one in labels:
        with_label = select(job_labels.c.job_num).where(job_labels.c.key == one.name)
        if one.value is not None:
            with_label = with_label.where(job_labels.c.value == one.value)
        found = jobs.c.num.in_(with_label)
        query = query.where(~found if one.negated else found)
    for word in search_words(search):
        places = [column.icontains(word, autoescape=True) for column in _SEARCHED]
        query = query.where(or_(*places, jobs.c.num.in_(_with_word(word))))
    return query


def _with_word(word: str) -> Select[Any]:
    """Numbers of the jobs with a label whose name or value holds the word; NAME=VALUE is one label."""
    name, equals, value = word.partition("=")
    columns = (job_labels.c.key, job_labels.c.value)
    anywhere = or_(*(column.icontains(word, autoescape=True) for column in columns))
    if equals and name:
        anywhere = or_(anywhere, (job_labels.c.key == name) & job_labels.c.value.icontains(value, autoescape=True))
    return select(job_labels.c.job_num).where(anywhere)
