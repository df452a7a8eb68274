"""Text data: from text files to token shards on local disk, and from memory-mapped shards to samples.

    documents -> tokenizer (or tokenising, on all cores) -> corpus     `prepare`, once per node
                                                            corpus -> dataset     samples, in every worker

Called by the built-in tasks and by `shoal data prepare`. It never downloads anything, and never deletes from the cache.
"""
