"""Who may do what: roles, permissions and principals (`roles.py`), and the form of API tokens (`tokens.py`).
The HTTP edge, the store and the clients call it.
It is pure: it reads no clock, no file and no environment, and it never sees a stored token.
"""
