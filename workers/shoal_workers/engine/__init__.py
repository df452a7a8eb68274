"""Trains one rank of a job in one worker: engine.py and trainer.py on top of rooms that import only those below them.

Called by actor.py (under the service) and by standalone.py (under torchrun). Never imports Ray, and never decides
anything about a job: the supervisor does.
"""
