"""kvcoord keeps the KV caches of a multi-GPU model server equal on every rank.

The names a user needs are here: `connect` and `connect_blocking` (the client), and the
outcomes they return. Importing this package never imports torch, numpy or zmq.
"""

__version__ = "0.1.0"
