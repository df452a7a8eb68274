"""What the benchmarks' figures mean: trials, stamps of steps, pause and regain, the tables, the machine in words.

Called by bench/ (which measures) and by the page generators in tools/. Starts no process and measures nothing itself.
"""
