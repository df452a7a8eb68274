"""Resources of the API as text for a terminal: tables, pages, bars, curves, the progress of a followed job.

Called by the commands and by the demo.
Never talks to the server and never reads the clock: every function takes values and returns text or a rich object.
"""
