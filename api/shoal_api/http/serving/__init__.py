"""The server below the application: its sockets, the connections on them, and its clean stop.
The composition root, tests and benchmarks call `server.make_server`.
It knows no route and no principal, and never reads a body.
"""
