"""The graph of a run: what happens in which order, where it runs, and what was written down about it.

Invariants: the state of a run is a pure function of its events; both ledgers balance after every event; Ray appears
only in `run` and `actors`, so that everything else is tested without it.
"""
