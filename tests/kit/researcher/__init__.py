"""Tasks of a researcher over the real pages: `person` does only what a person does and counts it, `looking` has the
tasks that only look, `changing` those that change jobs, nodes or tokens, `running` does them all.

Run by tests/browser/test_researcher_tasks.py, and by tools/researcher_tasks.py, which writes their counts into
docs/researcher-tasks.md. A task never opens an address: it begins at the page of all jobs and finds its way.
"""
