"""On a real cluster: `shoal gc` removes packages from a node that none of its processes uses, and no others."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal_api.client import Client
from shoal_workers.package_sets import hold, root_of_node

DAY = 86_400.0


@pytest.fixture
def sets() -> Iterator[tuple[str, str]]:
    """Two that were not used for 40 years, so that nobody's own ones are as old; the second is used now."""
    root, keys = root_of_node(), (secrets.token_hex(16), secrets.token_hex(16))
    files = []
    for key in keys:
        (root / key).mkdir(parents=True)
        (root / key / "module.py").write_text("x = 1\n")
        files.append(hold(root, key, lambda _: None))
        at = time.time() - 40 * 365 * DAY
        os.utime(root / f"{key}.use", (at, at))
    files[0].close()
    yield keys
    files[1].close()
    for key in keys:
        _remove(root, key)


def _remove(root: Path, key: str) -> None:
    for path in root.glob(f"{key}/*"):
        path.unlink()
    if (root / key).is_dir():
        (root / key).rmdir()
    (root / f"{key}.use").unlink(missing_ok=True)


def test_gc_removes_packages_that_no_process_of_the_node_uses(client: Client, sets: tuple[str, str]) -> None:
    root, (old, used) = root_of_node(), sets
    planned = {one.name.partition("/")[2]: one for one in client.gc(dry_run=True).removals if one.kind == "packages"}
    assert old in planned and used not in planned
    assert "last used 14600 days ago, and retain_packages_days is 30" in planned[old].reason
    assert planned[old].name.partition("/")[0] in {node.node_id for node in client.cluster().nodes}
    assert old in {one.name.partition("/")[2] for one in client.gc().removals if not one.error}
    assert not (root / old).exists() and not (root / f"{old}.use").exists()
    assert (root / used / "module.py").exists()
