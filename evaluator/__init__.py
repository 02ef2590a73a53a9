"""Honest measurement of a candidate against its reference."""
