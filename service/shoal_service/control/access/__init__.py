"""The server's side of access that is neither a decision nor a table: the token of the owner in the state directory.
`shoal serve` calls it once at its start.
It never prints a token, and it leaves tokens of others alone.
"""
