"""Files that are read whole: their text, or what JSON says; whatever is wrong with them is a UserError of one line."""

import json
from pathlib import Path
from typing import Any

from gssim.limits import excess
from gssim.units import UserError


def read_text(path: Path) -> str:
    """Return the text of a file in UTF-8, without a byte-order mark; raise UserError where there is none."""
    try:
        if (why := excess("file_bytes", path.stat().st_size)) is not None:
            raise UserError(f"{path}: {why}")
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: cannot be read: it is no text in UTF-8: {error.reason}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:  # a name with a character that no file system takes
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: cannot be read: {error}") from None


def read_json(path: Path) -> Any:
    """Return what is in the JSON file `path`; raise UserError where there is none or it is broken."""
    return parsed_json(read_text(path), file=str(path))


def parsed_json(content: str | bytes, *, file: str) -> Any:
    """Return what the content of a JSON file says; raise UserError where it is broken."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:  # not JSON, a number of thousands of digits, brackets without end
        raise UserError(f"{file}: not a JSON file: {error}") from None
