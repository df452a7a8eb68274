"""The language in which users select, order and show jobs: `lr > 1e-3 and label.team == "speech"`.

`fields` says which names exist and what a job's value under each is; `language` parses a text into a condition. The
HTTP edge parses what the page, the client and the command line send, `store/job_conditions.py` makes SQL of it. Pure:
it reads no clock, `now` is passed; and it never evaluates a text.
"""
