"""What tests and benchmarks share: `processes` (real processes and servers), `worlds` (cases and simulated attempts),
`programs` (scripts that a test starts), `tasks` and `ray_tasks` (tiny tasks), `shadowing` (a user's directory).

Imported by tests/ and bench/ only. Holds no test, and imports neither.
"""
