"""Runs a program that trains by itself: one process of it per worker and generation, as torchrun does.

    worker (runner.py)  == link ==>  guardian (guardian.py)  == fork ==>  the script (program.py)  -- its children

`ScriptRunner` takes the place of the engine in a worker whose spec has `script`; the worker's actor calls it. The
guardian forks the script and ends it with all that it leaves, also when the worker dies. Nothing here knows what the
script does inside; what it logs with the package `shoal` becomes step reports (hook.py). No process group is made here.
"""
