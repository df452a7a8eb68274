"""Access at the HTTP edge: who makes a request (`authentication.py`), and what each route needs (`needs.py`).
`create_app` installs the one, and each route declares the other: `create_app` fails if one declares nothing.
It decides nothing: `core/access.py` does.
"""
