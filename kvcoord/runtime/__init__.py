"""Async shells that run the machines: they move bytes, time and signals, and decide nothing.

A shell takes what has arrived as one batch, steps its machine for each event, performs the effects in order, and sets
one alarm for the machine's next deadline. There is no task per message and no lock.
"""
