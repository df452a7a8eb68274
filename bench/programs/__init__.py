"""What the doors for programs cost: a script and a loop under Shoal, beside the same script under torchrun.

`main.py` starts, kills and measures; `script.py` and `loop.py` do the same work (`work.py`), and are the code of the
jobs, so they import each other by their own names. They never import the benchmark.
"""
