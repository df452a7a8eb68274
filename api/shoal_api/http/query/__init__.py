"""Parameters of queries that several routes share: how they are described, and what they become.

Used by the routes; it reads no store and answers no request.
"""
