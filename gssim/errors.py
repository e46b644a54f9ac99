"""Exceptions that are shown to users: invalid input, and failed runs; and the line that shows a text."""


def one_line(text: str, longest: int | None = None) -> str:
    r"""Return a text for one line of a console: unprintable characters escaped, the middle of a long one left out.

    >>> one_line("a\nb\x1b[31m"), one_line("from the beginning to the end", 20)
    ('a\\nb\\x1b[31m', 'from the b ... e end')
    """
    shown = text
    if not text.isprintable():
        shown = "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in text)
    if longest is None or len(shown) <= longest:
        return shown
    tail = (longest - 5) // 3
    return f"{shown[: longest - 5 - tail].rstrip()} ... {shown[-tail:].lstrip()}"


class UserError(ValueError):
    """An error that the user can fix: one line that names the file, the key, the value and what is allowed."""

    def __init__(self, message: str = "") -> None:
        super().__init__(one_line(message))  # names and values may hold anything


class MistakenNameError(UserError):
    """An unknown key or a missing file: probably a typing error."""


class RunFailedError(RuntimeError):
    """A run that failed through no fault of the user: one line that names the rank or command, and the reason."""

    def __init__(self, message: str = "") -> None:
        super().__init__(one_line(message))
