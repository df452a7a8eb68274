"""One attempt's workers: the Ray actors, a client of each one, and the probe that notices their end.

Called by the executor. It never decides: answers and failures of calls become events of the attempt machine.
"""
