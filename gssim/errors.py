"""Exceptions that are shown to users: invalid input, and failed runs."""


class UserError(ValueError):
    """An error that the user can fix: one line that names the file, the key, the value and what is allowed."""


class MistakenNameError(UserError):
    """An unknown key or a missing file: probably a typing error."""


class RunFailedError(RuntimeError):
    """A run that failed through no fault of the user: one line that names the rank or command, and the reason."""
