"""Commands that let a job go on in place: to more steps, after a failure, with new code; and those that label it.

`shoal submit --from`, which makes a new job, is in `commands/submit.py`. The main module registers them; they decide
nothing.
"""
