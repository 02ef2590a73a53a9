"""The learner's errors; each says what was wrong and what to do next."""

from __future__ import annotations

from tasks.errors import KontrastError, UsageError


class NotFiniteError(KontrastError):
    """A log-probability or gradient is NaN or infinite: weights or sampler are broken, and training would spread it."""


class UntrainableSample(UsageError):
    """A sample has no token ids: it came from an engine that only relays text."""


class GroupLeftTwice(KontrastError):
    """A group was about to leave a second time: a defect, since it would be trained on twice or lost."""


class CheckpointError(KontrastError):
    """A checkpoint cannot be written or read."""


class PublishError(KontrastError):
    """New weights did not reach every engine; those that were paused stay so until the next complete publication."""

    exit_code = 3
