"""Tests of one service with several clusters. A package, so that the two clusters end with its last test.

An idle cluster takes a tenth of a core, which the tests of other folders need. pytest ends fixtures of the scope
`package` for a package only. Nothing is imported from here.
"""
