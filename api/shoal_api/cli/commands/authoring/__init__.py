"""Commands that write specs or make many of one: init, sweep.

Registered by `cli/main.py`. They decide nothing: the server checks and keeps what they send.
"""
