"""Projects with their quotas, users with their limits, the order of the queue with its reasons, cordons and maintenance
windows, as functions of an open transaction. Called by `Store`; `methods` and `node_methods` have its methods for them.
Nothing here decides: the scheduler explains the order, and users set the quotas.
"""
