"""Files in the storage of a job, as its workers collect them."""

import hashlib
import secrets
from collections.abc import Mapping
from pathlib import Path

from shoal_workers.contract.outputs import FOLDER, MANIFEST, OutputFile, OutputManifest


def keep_files(root: Path, node: int, files: Mapping[str, bytes], *, num_left_out: int = 0) -> None:
    """Write what a worker of this node has collected. `root`: the job's directory in the storage."""
    place = root / FOLDER / str(node)
    place.mkdir(parents=True)
    kept = []
    for name, data in files.items():
        content, digest = secrets.token_hex(16), hashlib.sha256(data).hexdigest()
        (place / content).write_bytes(data)
        kept.append(OutputFile(name=name, bytes=len(data), modified_ns=5 * 10**9, sha256=digest, content=content))
    manifest = OutputManifest(
        directory=f"d{node}", attempt=1, generation=1, files=tuple(kept), num_left_out=num_left_out
    )
    (place / MANIFEST).write_text(manifest.model_dump_json())
