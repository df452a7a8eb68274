"""The store's part about signed calls: the private key of each job's newest attempt. Called by drivers only."""
