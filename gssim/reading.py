"""Files that are read whole: their text, what JSON says, the rows of CSV; what is wrong with them is a UserError.

[Note: formulas] Spreadsheets take a cell that begins with one of `=+-@` for a formula, and may run what it says. So
texts that do are written with an apostrophe before them, as spreadsheets themselves mark text, and read without.
"""

import csv
import io
import json
import math
from collections.abc import Sequence
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


FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")
"""See [Note: formulas]."""


def as_text_cell(text: str) -> str:
    """Return a text as a cell of CSV that no spreadsheet takes for a formula; see [Note: formulas].

    >>> as_text_cell("=1+1"), as_text_cell("gs"), of_text_cell("'=1+1"), of_text_cell("it's")
    ("'=1+1", 'gs', '=1+1', "it's")
    """
    return f"'{text}" if text.startswith((*FORMULA_STARTS, "'")) else text


def of_text_cell(cell: str) -> str:
    """Return the text that `as_text_cell` was given."""
    return cell[1:] if cell.startswith("'") and cell[1:].startswith((*FORMULA_STARTS, "'")) else cell


def read_rows(
    path: Path, needed: Sequence[str] = (), what: str = "a table"
) -> tuple[tuple[str, ...], list[dict[str, str]]]:
    """Return the columns of a CSV file, and its rows by these; what a row lacks is empty.

    Raises UserError where there is no such file, or a column of `needed` is missing: then it is not `what`.
    """
    reader = csv.DictReader(io.StringIO(read_text(path), newline=""))
    try:
        names = [name.strip() for name in reader.fieldnames or ()]
        missing = [name for name in needed if name not in names]
        if missing:
            raise UserError(f"{path}: not {what}: no column '{missing[0]}'")
        reader.fieldnames = names
        rows = [{name: of_text_cell(row[name] or "") for name in names} for row in reader]
        return tuple(names), rows
    except csv.Error as error:
        raise UserError(f"{path}: not {what}: {error}") from None


def number_in(row: dict[str, str], column: str, path: Path) -> float | None:
    """Return the number in a row's column, None where it is empty; raise UserError where it is no finite number."""
    text = row.get(column, "").strip()
    if not text:
        return None
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"{path}: {column} = {text!r}: must be a finite number")
    return number
