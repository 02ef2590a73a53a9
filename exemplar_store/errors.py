"""What can go wrong between Kontrast and its store."""

from __future__ import annotations

from tasks.errors import KontrastError, UsageError


class StoreError(KontrastError):
    """The store refused or failed; the text says what to do."""


class StoreUnreachable(StoreError):
    """No server answers at the given place, or it stopped answering."""


class StoreFull(StoreError):
    """The server has no memory or disk left: nothing was written, and intake must stop."""


class StoreLocked(StoreError):
    """The folder belongs to a running server that cannot be reached from here."""


class UnknownSchema(StoreError):
    """The data were written by a version of Kontrast with another key layout."""


class DamagedValue(StoreError):
    """A stored value is not what was written."""


class StaleToken(StoreError):
    """A newer holder of the same role has taken over; this one must end."""


class StoreUsageError(UsageError, StoreError):
    """The caller asked for something that the store cannot mean."""
