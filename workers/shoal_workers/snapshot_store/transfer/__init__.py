"""Moving parts of snapshots between processes: restore from them, copy them to the buddy, serve them to other nodes.

Called by the snapshot store: `loading` on the training thread; `sender`, `server` and `peer_maps` run threads of
their own. The rendezvous store's connections use `wire`, too.
It never unpickles what it receives, never waits without a limit, and never chooses which slot may be overwritten.
"""
