"""Which jobs a list holds: labels and words to search for, as a user writes them.

Used by the HTTP edge and the command line, which parse, and by the store, which makes SQL of them. Pure.
"""
