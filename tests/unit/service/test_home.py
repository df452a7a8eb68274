"""What an answer that is no success means for those who dial in."""

import pickle

import pytest

from shoal_service.home import DialError, Rejected, Superseded, Unavailable, make_error


@pytest.mark.parametrize(
    ("status", "kind"),
    [(409, Superseded), (429, Unavailable), (503, Unavailable), (401, Rejected), (404, Rejected), (422, Rejected)],
)
def test_only_what_may_help_later_is_asked_again(status: int, kind: type[DialError]) -> None:
    error = make_error(status, "words of the service", "")
    assert type(error) is kind and str(error) == "words of the service"


@pytest.mark.parametrize(
    ("retry_after", "after_s"),
    [("", 0.0), ("3", 3.0), ("1.5", 1.5), ("-1", 0.0), ("900", 30.0), ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0)],
)
def test_the_pause_is_the_one_that_the_service_asks_for_within_bounds(retry_after: str, after_s: float) -> None:
    error = make_error(503, "not ready", retry_after)
    assert isinstance(error, Unavailable) and error.after_s == after_s
    again = pickle.loads(pickle.dumps(error))
    assert (again.after_s, str(again)) == (after_s, "not ready")
