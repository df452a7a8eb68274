"""KeptJournal: the journal of a simulated attempt in its records, as a supervisor that writes each state keeps it."""

from __future__ import annotations

from shoal_service.core.attempt.state.attempt import ATTEMPT_JSON, Attempt
from shoal_service.supervisor.journal_records import changes, encode, is_entry_due, make_digest, replayed


class KeptJournal:
    def __init__(self) -> None:
        self._before: Attempt | None = None
        self._entry = b""
        self._records: list[bytes] = []

    def written(self, state: Attempt) -> Attempt:
        """Writes it, and returns what a successor reads."""
        before, self._before = self._before, state
        if before is None or is_entry_due(len(self._entry), len(self._records), sum(map(len, self._records))):
            self._entry, self._records = ATTEMPT_JSON.dump_json(state), []
        elif (change := changes(before, state)) is not None:
            self._records.append(encode(make_digest(self._entry), len(self._records) + 1, change))
        found = replayed(self._entry, reversed(self._records))
        assert (found.num_changes, found.num_lost) == (len(self._records), 0)
        return ATTEMPT_JSON.validate_json(found.entry)
