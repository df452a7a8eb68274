"""What client, service and shards say to each other: pure data and pure functions.

Imports the standard library and pydantic, nothing else (an import-linter contract holds this), so that the control
plane can speak the language of the shards without loading torch.
"""
