"""Watching a process: flight recorder, metrics, logs, and the HTTP port that shows them. Never steers.

Nothing here is on the way of a decision: leave the whole folder out and the ranks agree all the same.
It knows no machine, pool or socket; it is given values, or a callable that returns a snapshot.
"""
