"""The store's part about access: API tokens, sessions of the page, and the audit. `AccessMethods` is a part of `Store`.
The HTTP edge and `shoal serve` call it.
It never keeps a secret: of tokens and cookies it has the SHA-256. Nothing changes or deletes an audit event.
"""
