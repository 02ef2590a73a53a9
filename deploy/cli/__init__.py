"""The commands, a file each.

Invariants: a module here imports nothing heavy at its top; what a command prints to stdout is its result, everything
else goes to stderr.
"""
