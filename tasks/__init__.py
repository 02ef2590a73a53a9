"""What is to be optimized: tasks and the records that pass between packages; the ground floor.

Invariants: imports nothing above it and nothing heavy (stdlib and pydantic; the parquet reader only where used);
a task is identified by its content, whatever its path or id.
"""
