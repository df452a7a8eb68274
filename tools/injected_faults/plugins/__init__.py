"""Plugins of the pytest processes that `reach` and `trials` start in a copy of the tree, with `pytest -p`.

Environment variables say which files they read and write. They import nothing of the product, and no
process of the normal test run loads them.
"""
