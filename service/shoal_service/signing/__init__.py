"""Signed calls from the control plane to the supervisors of attempts: Ed25519, one key pair per attempt.

The control plane has the private key, in its database; a supervisor has the public key, in its configuration. Pure: no
clock, no Ray, no SQL. Decision 0045.
"""
