"""Errors that users see: mistakes in their input, and runs that failed."""


class UserError(ValueError):
    """Something the user can mend: one line that names the file, the key, the value and what is allowed."""


class MistakenNameError(UserError):
    """A key or file that there is not: a slip of the pen, whatever else it is combined with."""


class RunFailedError(RuntimeError):
    """A run that cannot end well through no fault of the user's: one line that names the rank or command, and why."""
