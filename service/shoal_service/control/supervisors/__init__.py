"""How drivers call the supervisors of attempts: with signatures, if the attempt has a key.
Used by `control/driver.py`.
It decides nothing about an attempt, and never hands a private key on.
"""
