"""A simulated cluster around the pure attempt machine: it performs the machine's commands and checks each of them.

Called by the tests of service/core/attempt through the fixture `new_world`. Starts no process and reads no clock.
"""
