"""Routes about profiles of running jobs: request one, list them, download their files.

Called by `http/app.py`. They decide nothing: the store keeps the requests, the supervisor carries them out.
"""
