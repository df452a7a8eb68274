"""Clusters as the control plane sees them: what their gateways report, and calls that are orders to them.

Wired by `shoal serve`. It never speaks to a gateway: everything goes through the store, so that each control plane has
the same view and a takeover loses nothing.
"""
