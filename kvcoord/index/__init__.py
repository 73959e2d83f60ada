"""Which pages are where: page keys, the radix tree of one rank, eviction.

Pure: no I/O, no clock, no randomness. Knows keys, tiers and slot numbers; knows nothing of bytes, of pools that own
the slots, of other ranks, or of when a change is allowed.
"""
