"""The store's part about signed calls: the private key of each job's newest attempt. `SigningMethods` is part of it.
Only drivers of the control loop call it.
A key never leaves this process: no view, log or message has it.
"""
