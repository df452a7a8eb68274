from concurrent.futures import ThreadPoolExecutor

from shoal_service.telemetry.tallies import RequestMetrics


def test_requests_are_counted_by_method_route_and_class_of_status() -> None:
    metrics = RequestMetrics()
    for status in (200, 201, 404, 500, 0):
        metrics.observe("GET", "/v1/jobs", status, 0.02)
    assert metrics.requests() == {
        ("GET", "/v1/jobs", "2xx"): 2,
        ("GET", "/v1/jobs", "4xx"): 1,
        ("GET", "/v1/jobs", "5xx"): 1,
        ("GET", "/v1/jobs", "none"): 1,
    }
    latency = metrics.latencies()["GET", "/v1/jobs"]
    assert latency.count == 5
    assert abs(latency.total - 0.1) < 1e-9


def test_clients_cannot_make_it_grow_without_bound() -> None:
    metrics = RequestMetrics()
    for i in range(1000):
        metrics.observe(f"X{i}", f"/route/{i}", 200, 0.0)
    assert len(metrics.requests()) <= 201
    assert sum(metrics.requests().values()) == 1000
    assert {method for method, _, _ in metrics.requests()} == {"other"}


def test_no_request_is_lost_between_threads() -> None:
    metrics = RequestMetrics()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: metrics.observe("GET", f"/{i % 3}", 200, 0.01), range(2000)))
    assert sum(metrics.requests().values()) == 2000


def test_a_value_on_a_bound_belongs_to_it() -> None:
    metrics = RequestMetrics()
    metrics.observe("GET", "/", 200, 0.001)
    metrics.observe("GET", "/", 200, 61.0)
    latency = metrics.latencies()["GET", "/"]
    assert (latency.counts[0], latency.counts[-1], latency.count) == (1, 1, 2)


def test_a_stream_is_counted_and_its_duration_is_not() -> None:
    metrics = RequestMetrics()
    metrics.stream_opened()
    assert metrics.num_streams == 1
    metrics.observe("GET", "/v1/jobs/{job_id}/events", 200, None)
    metrics.stream_closed()
    assert metrics.num_streams == 0
    assert metrics.latencies() == {} and len(metrics.requests()) == 1
