"""On which rank each worker is, and with which layout: `group.forming` calls `choice.choose` for each group.

    rank_order     candidates on nodes, the last group, a layout -> candidates by rank
    node_memory    workers by rank, their predicted need -> whether they fit into the memory of their machines
    choice         layout, planned for the nodes, and workers of the next group

Before that, `node_choice` says on which node a new worker ought to be. Pure; starts no worker.
"""
