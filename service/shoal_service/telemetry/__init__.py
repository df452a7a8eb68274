"""Metrics: their one catalogue, the collector that reads the store at each scrape, and the counts of HTTP requests.

Called by `shoal serve` and the HTTP edge. It never keeps old numbers, and never registers anything globally.
"""
