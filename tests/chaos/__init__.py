"""Tests of faults on purpose. A package, so that the cluster of several nodes ends with its last test.

An idle cluster takes a tenth of a core, which the tests of other folders need. pytest ends fixtures of the scope
`package` for a package only. Nothing is imported from here.
"""
