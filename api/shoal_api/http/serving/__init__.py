"""The server below the application: its sockets, its connections, and its stop. It knows no route.
The composition root, tests and benchmarks call `make_server`.
"""
