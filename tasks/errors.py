"""The one error that the command line turns into a sentence and an exit code."""


class KontrastError(Exception):
    """Something from outside is wrong: the text says what, and what to do. No traceback is shown for it.

    `exit_code` is what the process ends with: 2 bad usage or input, 3 nothing could be scored, 1 otherwise.
    """

    exit_code = 1


class UsageError(KontrastError):
    """Bad usage: a missing file, an unknown id, an ill-formed task or configuration."""

    exit_code = 2
