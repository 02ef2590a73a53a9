"""The three versions that every record carries and `kontrast --version` prints."""

PACKAGE_VERSION = "0.1.0"

EVALUATOR_VERSION = "3"
"""Raised whenever a verdict or a number of the evaluator may change for the same candidate."""

RECORD_SCHEMA_VERSION = 2
"""Raised whenever a stored record changes its fields; readers refuse what they do not know."""
