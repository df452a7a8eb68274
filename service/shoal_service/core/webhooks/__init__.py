"""Decisions about webhooks: which events a hook selects, and when a failed delivery is tried again or given up.

Pure; `control/webhooks` delivers and `store/webhook_lanes.py` keeps the cursors. Never opens a connection, never sees
a secret.
"""
