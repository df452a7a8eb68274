"""Text data: from text files to token shards on local disk, and from memory-mapped shards to samples.

Inside: `sources`, `documents`, `tokenizer`, `shards` and `index`, which `prepare` uses once per node; `dataset`.
Called by the built-in tasks and by `shoal data prepare`. It never downloads anything, and never deletes from the cache.
"""
