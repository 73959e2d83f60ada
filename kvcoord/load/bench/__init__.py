"""Benchmarks: what kvcoord costs, each beside its peer in the same run on the same machine.

`result` says what all of them return; `budgets` puts them against the promises. Timings are measured, never asserted.
"""
