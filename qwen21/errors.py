"""The two kinds of failure a person meets. Each message is one sentence: what, found, expected, way out."""


class Qwen21Error(Exception):
    """Something outside the program's control went wrong: a file, a checkpoint, memory."""


class UsageError(Qwen21Error, ValueError):
    """The request itself cannot be carried out as it was put."""
