"""The files that `shoal init` writes: a folder for each template.

The first comment line of a template's job.yaml says what it is. Names that end in `.template` lose that ending: a
task's module is no module of Shoal, and nothing here imports it.
"""
