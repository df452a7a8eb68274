"""Which format a scraper gets, by RFC 9110."""

import gzip

import pytest

from shoal_service.telemetry.text_format import OPENMETRICS, TEXT, compressed, media_type_of

PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,application/openmetrics-text;"
    "version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("", TEXT),
        ("*/*", TEXT),
        ("application/openmetrics-text", OPENMETRICS),
        ("Application/OpenMetrics-Text; Version=1.0.0", OPENMETRICS),
        (PROMETHEUS_3, OPENMETRICS),
        ("application/openmetrics-text;q=0", TEXT),
        ("application/openmetrics-text;q=0, */*", TEXT),
        ("application/openmetrics-text;version=1.0.0;q=0.2, text/plain;q=0.9", TEXT),
        ("application/openmetrics-text;version=1.0.0;q=0.9, text/plain;q=0.2", OPENMETRICS),
        ("application/openmetrics-text, text/plain;q=0, */*", OPENMETRICS),
        ("application/openmetrics-text;version=9.9.9", TEXT),
        ("application/openmetrics-text;version=1.0.0\r\nx: y", TEXT),
        ("application/openmetrics-text;q=much", TEXT),
        ("application/json", TEXT),
    ],
)
def test_a_scraper_gets_the_format_that_it_prefers_of_a_version_that_there_is(accept: str, expected: str) -> None:
    assert media_type_of(accept) == expected


@pytest.mark.parametrize(
    ("accept", "is_small"),
    [
        ("gzip", True),
        ("deflate, GZIP;q=0.5", True),
        ("*", True),
        ("gzip;q=0", False),
        ("gzip;q=0.0, *", False),
        ("", False),
    ],
)
def test_only_who_accepts_gzip_gets_it(accept: str, is_small: bool) -> None:
    body = b"shoal_jobs 1\n" * 1000
    small = compressed(body, accept)
    assert (small is not None and gzip.decompress(small) == body) == is_small
    assert compressed(b"shoal_jobs 1\n", accept) is None
