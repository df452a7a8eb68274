"""The parameters `label` and `search` of lists of jobs."""

from __future__ import annotations

from collections.abc import Sequence

from shoal_api.http.problem_types import Kind
from shoal_api.http.problems import ProblemError
from shoal_service.core.selection import MAX_SELECTORS as MAX_SELECTORS
from shoal_service.core.selection import InvalidSelector, LabelSelector

LABEL_FORMS = (
    "Only jobs whose labels match: `NAME`, `!NAME`, `NAME=VALUE` or `NAME!=VALUE`. May be repeated; all must match."
)
SEARCH_WORDS = "Words, each a part of a name, an id, a project, a user or a label; all must be found."


def selectors_of(texts: Sequence[str]) -> tuple[LabelSelector, ...]:
    """Raises ProblemError."""
    try:
        return tuple(LabelSelector.parse(text) for text in texts)
    except InvalidSelector as error:
        raise ProblemError(Kind.INVALID_REQUEST, str(error)) from None
