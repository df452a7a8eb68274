"""The formats of shards, a module each: how a sample is found in a file that is mapped into memory, and what its bytes
mean.

Called by `shard_formats`, which chooses the module. None of them needs the library that wrote the shards, and none
unpickles anything.
"""
