"""One rank's side of islands, which train one model together: rounds, what is written to the storage, and compression.

Called by the trainer between the vote and the update, see `contract/islands.py`. It never decides which islands a round
has, and opens no connection to another island.
"""
