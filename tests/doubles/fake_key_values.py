"""FakeKeyValueStore: one namespace of the Ray head's key-value store, and a head that can be away."""

import threading

from shoal_service.cluster.errors import GcsUnavailable


class FakeKeyValueStore:
    """A `journal.KeyValueStore`."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.is_away = False
        self.refused = threading.Event()
        """A call was refused since this was cleared."""

    def get(self, key: bytes) -> bytes | None:
        self._require_head()
        return self.values.get(key)

    def put(self, key: bytes, value: bytes) -> None:
        self._require_head()
        self.values[key] = value

    def add(self, key: bytes, value: bytes) -> bool:
        self._require_head()
        if key in self.values:
            return False
        self.values[key] = value
        return True

    def keys(self, prefix: bytes) -> list[bytes]:
        self._require_head()
        return [key for key in self.values if key.startswith(prefix)]

    def delete_all(self, prefix: bytes) -> None:
        for key in self.keys(prefix):
            del self.values[key]

    def delete(self, key: bytes) -> None:
        self._require_head()
        self.values.pop(key, None)

    def _require_head(self) -> None:
        if self.is_away:
            self.refused.set()
            raise GcsUnavailable("the head is away")
