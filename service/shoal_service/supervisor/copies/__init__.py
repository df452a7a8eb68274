"""Copies of what an attempt was started with: the configuration of its supervisor, and the code of its job.

They lie beside the journal in the head's tables, and go with it. Read when Ray has forgotten the original, or starts no
supervisor by itself. Never changed after they are made.
"""
