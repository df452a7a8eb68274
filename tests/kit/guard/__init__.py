"""Ends what a test run has started, however the run ends: `guard` starts a program (`process_guard`) that waits for it.

`guard` is called by tests/conftest.py and by the servers of tests. It ends nothing that the run has not started.
`interrupted_run` is the run that its test interrupts.
"""
