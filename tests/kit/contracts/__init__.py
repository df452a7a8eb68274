"""Contract tests of Shoal's own protocols: what a fake and the real one have in common.

Subclassed by `tests/unit/doubles` (fakes, and what needs no cluster) and by `tests/kit/programs/ray_contracts.py`.
"""
