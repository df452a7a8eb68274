"""Which rank computes something wrong, or holds something wrong, without an error: found while training, by all ranks.

    replay          three ranks compute the same micro-batch again: a processor or a kernel that computes wrong
    replica_check   checksums of state that several ranks hold: memory that changed
    non_finite      a loss that is not finite: the task's fault, or that of one of the other two

Called by the trainer on every rank. It names ranks as suspects, and never removes one: the supervisor does.
"""
