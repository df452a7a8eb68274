"""What happens around the code under test: `attempt` (a simulated cluster), cases of layouts, jobs of the tiny task.

Imported by the conftest files and by tests. Starts no process of its own.
"""
