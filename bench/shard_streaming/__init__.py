"""Streaming of shards from a server that computes 500 TB: first batch, waits, memory, and how well blocks shuffle.

`main.py` is the command, which `make bench-streaming` runs. `reader` is one process that reads, `shuffling` compares
orders. Nothing here is part of the product, and no data set is stored.
"""
