"""What every metric has, those of requests and steps, and the format that a scraper gets."""

import gzip
from concurrent.futures import ThreadPoolExecutor

import pytest

from shoal_service.telemetry.catalogue import STEP_BOUNDS_S, Kind, StepTimes
from shoal_service.telemetry.exposition import ALL
from shoal_service.telemetry.tallies import RequestMetrics
from shoal_service.telemetry.text_format import OPENMETRICS, TEXT, choose_media_type, compress


def test_every_metric_has_help_and_histograms_have_rising_buckets() -> None:
    for metric in ALL:
        assert metric.help.endswith(".")
        assert (metric.kind is Kind.HISTOGRAM) == bool(metric.buckets)
        assert list(metric.buckets) == sorted(set(metric.buckets))
        assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)


def test_requests_are_counted_by_method_route_and_class_of_status() -> None:
    metrics = RequestMetrics()
    for status in (200, 201, 404, 500, 0):
        metrics.observe("GET", "/v1/jobs", status, 0.02)
    assert metrics.finished.values() == {
        ("GET", "/v1/jobs", "2xx"): 2,
        ("GET", "/v1/jobs", "4xx"): 1,
        ("GET", "/v1/jobs", "5xx"): 1,
        ("GET", "/v1/jobs", "none"): 1,
    }
    latency = metrics.latencies.values()["GET", "/v1/jobs"]
    assert latency.count == 5
    assert abs(latency.total - 0.1) < 1e-9


def test_clients_cannot_make_it_grow_without_bound() -> None:
    metrics = RequestMetrics()
    for i in range(1000):
        metrics.observe(f"X{i}", f"/route/{i}", 200, 0.0)
    assert len(metrics.finished.values()) <= 201
    assert sum(metrics.finished.values().values()) == 1000
    assert {method for method, _, _ in metrics.finished.values()} == {"other"}


def test_no_request_is_lost_between_threads() -> None:
    metrics = RequestMetrics()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: metrics.observe("GET", f"/{i % 3}", 200, 0.01), range(2000)))
    assert sum(metrics.finished.values().values()) == 2000


def test_a_value_on_a_bound_belongs_to_it() -> None:
    metrics = RequestMetrics()
    metrics.observe("GET", "/", 200, 0.001)
    metrics.observe("GET", "/", 200, 61.0)
    latency = metrics.latencies.values()["GET", "/"]
    assert (latency.counts[0], latency.counts[-1], latency.count) == (1, 1, 2)


def test_a_stream_is_counted_and_its_duration_is_not() -> None:
    metrics = RequestMetrics()
    metrics.streams.add()
    assert metrics.streams.value() == 1
    metrics.observe("GET", "/v1/jobs/{job_id}/events", 200, None)
    metrics.streams.add(amount=-1)
    assert metrics.streams.value() == 0
    assert metrics.latencies.values() == {} and len(metrics.finished.values()) == 1


def test_a_step_time_on_a_bound_belongs_to_it() -> None:
    times = StepTimes().add([STEP_BOUNDS_S[0], STEP_BOUNDS_S[-1] + 1])
    assert (times.counts[0], times.counts[-1], sum(times.counts)) == (1, 1, 2)


def test_it_survives_its_column_exactly() -> None:
    times = StepTimes().add([0.1, 0.2, 0.3]).add([7.7])
    assert StepTimes.read(times.text()) == times


def test_an_empty_column_and_other_buckets_begin_at_zero() -> None:
    assert StepTimes.read("") == StepTimes.read("1 2 3 0.5") == StepTimes()


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
    assert choose_media_type(accept) == expected


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
    small = compress(body, accept)
    assert (small is not None and gzip.decompress(small) == body) == is_small
    assert compress(b"shoal_jobs 1\n", accept) is None
