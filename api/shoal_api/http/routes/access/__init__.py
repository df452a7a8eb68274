"""The routes about access: who one is and the page's sessions (`sessions.py`), API tokens (`tokens.py`), the audit.
`create_app` includes them.
They never answer with a secret that is stored: a token is shown when it is made, and not again.
"""
