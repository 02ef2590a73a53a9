"""Composes the packages into commands, runs and clusters."""
