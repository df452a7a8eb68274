"""The commands about access: open, login, logout, whoami (`login.py`) and token create, list, revoke (`tokens.py`).
cli/main.py registers them.
They never print a token, except the one that `shoal token create` has made.
"""
