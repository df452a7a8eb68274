"""How the workers of an attempt are polled: each by a call of its own, or all of a node by one call to its agent.

    time ------------------------------------------------------------------------------------------------------>

    worker a    <- poll ........ <- poll ..x            <- poll (of the agent) ......... <- poll ..x      <- poll
    worker b    <- poll .. <- poll ........x            <- poll (of the agent) ......... <- poll ..x      <- poll
    agent                     start, ping  |  <= poll(a, b) ...... <= poll(a, b) ............X SIGKILL    |
    supervisor  polls a and b directly     |  one call at a time for the node                | directly   | (until it
                                           |                                                 | again      | is started
                                    takes over: the direct calls                  call failed, or was      again)
                                    in flight are given up                        silent for too long

An agent is an optimisation. The positions (what was received, what is acknowledged) are the supervisor's, and a worker
keeps what is not acknowledged, so a poll that is given up or answered twice changes nothing. `agent_policy` decides,
`agent_pool` does it, `worker_polling` polls one worker, `ray_agents` are the calls. Called by the worker clients and
the executor. It never decides what a report means.
"""
