"""What one rank does with its cache: pure logic over pools, index, ledger and the rank's protocol machine.

Nothing here copies a byte, reads a clock or opens a socket: events come in, effects go out, and the same code runs in
the worker process and under simulation. All changes of the index happen at logical points that are the same on every
rank: an engine's call in lockstep, a verdict that is applied, or the next entry of the stream.
"""
