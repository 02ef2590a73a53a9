"""Prompts out, samples in."""
