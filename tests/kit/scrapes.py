"""Scrapes of a store, read back with prometheus_client's parser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from doubles.fake_cluster_source import FakeClusterSource
from shoal_service.planner.planning import profile_for
from shoal_service.store import Store
from shoal_service.telemetry.exposition import Exposition, Sources
from shoal_service.telemetry.tallies import PassTimes, RequestMetrics, WaitTallies, WebhookTallies

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]
NOW = 100.0


def exposition_of(
    store: Store,
    owner: str = "owner-1",
    requests: RequestMetrics | None = None,
    cluster: FakeClusterSource | None = None,
    state_dir: Path = Path("/"),
    webhooks: WebhookTallies | None = None,
    waits: WaitTallies | None = None,
    **clocks: Any,
) -> Exposition:
    sources = Sources(
        store=store,
        owner=owner,
        requests=requests or RequestMetrics(),
        passes=PassTimes(),
        cluster=(cluster or FakeClusterSource()).snapshot,
        profile_of=profile_for,
        state_dir=state_dir,
        webhooks=webhooks or WebhookTallies(),
        waits=waits or WaitTallies(),
    )
    return Exposition(sources, **{"clock": lambda: NOW, **clocks})


def scrape(store: Store, *arguments: Any, **named: Any) -> Samples:
    body, _ = exposition_of(store, *arguments, **named).render("")
    return samples_of(body.decode())


def samples_of(text: str) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value_of(samples: Samples, name: str, /, **labels: str) -> float | None:
    return samples.get((name, frozenset(labels.items())))
