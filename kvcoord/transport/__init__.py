"""Bytes between peers. Knows nothing of messages, ranks or groups: a payload is opaque.

`link` has the interfaces and limits. Ranks and coordinators meet over `node` links on one node and `zeromq` anywhere,
by the scheme of the address (`by_scheme`). `unix` and `blocking` are the local link between an engine and its sidecar,
`loopback` has the same interfaces inside one process.
"""
