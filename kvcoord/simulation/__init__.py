"""The production machines under a seed and a virtual clock, and the exhaustive explorer of small groups.

Nothing here opens a socket, starts a task or reads a clock. A world is made from a seed alone: the same seed gives the
same events in the same order, in any process.
"""
