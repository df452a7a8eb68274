"""The store's part about supervisors: tokens of attempts, what their supervisors report, and the directives for them.
`SupervisorMethods` is a part of `Store`.
Any control plane may take reports and answer directives; only the holder of the lease writes tokens and directives.
"""
