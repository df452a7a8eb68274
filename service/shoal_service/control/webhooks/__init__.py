"""Delivery of events to the receivers of webhooks, at least once and in order for each job.

`delivery.py` runs one task per lane (one hook for one job), `lane.py` delivers it, `message.py` makes and signs what is
sent. Run by `shoal serve`, beside the control loop, and only while that loop holds the lease. `core/webhooks` decides
what is sent and tried again; the store has the events and the cursors. A secret is never stored, logged or shown.
"""
