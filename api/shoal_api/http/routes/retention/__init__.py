"""Routes that delete jobs and what ended jobs leave behind.

Called by `http/app.py`. They decide nothing: the store refuses what may not be deleted, and
`control/retention.py` carries it out.
"""
