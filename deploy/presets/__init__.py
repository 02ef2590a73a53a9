"""Configurations by name."""
