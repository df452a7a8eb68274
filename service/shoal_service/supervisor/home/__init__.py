"""How a supervisor dials home: HTTP to the service's REST edge, outbound only, on threads of its own.

Made by `supervisor.py`. It never blocks the executor: while the service is away, reports wait in the outbox.
"""
