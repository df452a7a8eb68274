"""A script that leaves its mark: `script.py MARK GATES`."""

import sys

import mine

mine.leave(*sys.argv[1:])
