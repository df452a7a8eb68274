"""Projects with their quotas, and the order of the queue with its reasons, as functions of an open transaction.
Called by `Store`; `methods` has its methods for both.
Nothing here decides: the scheduler explains the order, and users set the quotas.
"""
