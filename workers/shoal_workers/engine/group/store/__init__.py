"""The rendezvous store: keys and values that the ranks of a generation exchange while they form their groups.

    worker of rank 0    StoreServer (one thread)   <--- StoreConnection --- GenerationStore (torch's Store interface)
                        KeyValues                       every rank, that of rank 0 too

It stands in the place of torch's TCPStore, which asks a name server for the name of every peer that connects. Here all
sockets are numeric, a server listens on one address of its host, and every connection proves that it knows the
attempt's key (docs/decisions/0002).
"""
