"""Training on shards in an object store without preparation: a data set whose order is a pure function of its seed.

    shard_list  which shards there are             order     which sample stands at each position
    kinds       samples of a shard of one format   cache     whole shards on the local disk, shared by a node
    reading     a sample, wherever its shard is    prefetch  the shards that are needed next
                             streamed_shards.StreamedShards puts them together

Called by tasks and loops. It never lists or reads the whole data set, and never keeps a position.
"""

from shoal_workers.data.streaming.kinds import FixedRecords
from shoal_workers.data.streaming.streamed_shards import StreamedShards

__all__ = ["FixedRecords", "StreamedShards"]
