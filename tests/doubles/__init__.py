"""Fakes of Shoal's own protocols: clock, workers, fleet, journal, catalog, node watch, cluster, supervisor handle.

Unit tests import them. A fake passes the same contract tests (`tests/kit/contracts`) as the real one. Starts nothing.
"""
