"""Bytes between peers. Knows nothing of messages, ranks or groups: a payload is opaque.

`link` has the interfaces and limits, `zeromq` the links to the coordinator, `unix` and `blocking` the local link
between an engine and its sidecar, `loopback` the same interfaces inside one process.
"""
