"""How requests reach a server: the servers of this process, whether they see our shared memory, and the pools for it.

A process knows a server as one `Endpoint`, however many handles use it. Not for the bytes of a request.
"""
