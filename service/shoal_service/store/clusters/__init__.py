"""The store's part about clusters: what their gateways have reported, and the orders to them. `ClusterMethods` is part
of it. Called by the HTTP edge and by `control/joined_clusters.py`.
It never looks into an order or a report: both are JSON texts of `shoal_service.clusters`.
"""
