"""What a run shows of itself: progress, summary, table, metrics, environment.

Invariant: everything is made from the run's events, so that it can be made from a stored stream as well.
"""
