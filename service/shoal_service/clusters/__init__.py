"""The wire between the service and the gateways of clusters: reports, orders and answers. Pure data, no Ray, no HTTP.

    control plane                        REST edge, store                          gateway
    JoinedCluster --- order -->  GET  /v1/clusters/{name}/orders   <-- dials --  carries it out with Ray
                  <-- answer --  POST /v1/clusters/{name}/reports  <-- dials --  answers, snapshots of the cluster

Both sides and the routes between them import this package. An answer has passed through a process that unpickles what
comes from nodes with code of users, so it is validated and bounded before anybody uses it (`verbs.py`).
"""
