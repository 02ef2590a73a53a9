"""Composes the packages into commands, runs and clusters; the top floor.

Invariants: it owns no arithmetic of measuring, sampling or learning; a run's state is a pure function of its events;
the floors inside are `cli`, then `augment`, `bench` and `observe`, then `graph`, then `config`, and imports point down;
importing it brings in neither torch nor Ray.
"""
