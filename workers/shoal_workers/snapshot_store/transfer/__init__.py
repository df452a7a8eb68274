"""Moving parts of snapshots between processes: restore from them, copy them to the buddy, serve them to other nodes.

Called by the snapshot store only: `loading` on the training thread; `sender` and `server` run threads of their own.
It never unpickles what it receives, never waits without a limit, and never chooses which slot may be overwritten.
"""
