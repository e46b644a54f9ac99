"""File input and output: atomic writes, locks of outputs, temporary folders, and reading of text, JSON and CSV.

Invalid files are reported as UserError.

[Note: what is ours] A file is written under another name in its own folder, synced, and renamed. The partial file's
name is derived from the file's name, so the next writer of the same file replaces the partial file of a killed writer.
Nothing else is removed. An existing device or pipe is written to directly, and a symbolic link is followed. A lock, a
partial file or a temporary folder is removed only if it has our mark and no process holds its lock; the kernel releases
a lock when its process ends.

[Note: formulas] Spreadsheets treat a cell that begins with one of `=+-@` as a formula, and may execute it. Such texts
are written with a leading apostrophe, as spreadsheets themselves mark text, and read without it.
"""

import csv
import errno
import glob
import hashlib
import io
import json
import math
import os
import re
import shlex
import shutil
import socket
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Literal, get_args

from gssim.errors import UserError, nearest_name, one_line
from gssim.units import LIMITS, excess, is_lifted

try:
    import fcntl
except ImportError:  # on Windows there is no locking
    fcntl = None  # type: ignore[assignment]

FOLDER_MARK = ".gssim-scratch"
"""File that marks a temporary folder as ours."""
Prefix = Literal["gssim-run-", "gsreal-run-"]
"""Prefix of a temporary folder's name, used by nothing else; by any other it would not be found after a kill."""
PREFIXES: tuple[Prefix, ...] = get_args(Prefix)
OUR_NAME = re.compile(rf"({'|'.join(PREFIXES)})[a-z0-9_]{{8}}")
"""Names of temporary folders, as `tempfile.mkdtemp` makes them."""
MOST_LINKS = 40
"""Longest chain of symbolic links, as in the kernel."""


# Writing --------------------------------------------------------------------------------------------------------------


def check_place(path: Path) -> None:
    """Raise UserError if no file can be written at `path`; called before the work whose result would be lost.

    A missing folder is created by the writer.
    """
    with _reported(path):
        if path.is_dir():
            raise UserError(f"{path}: cannot be written: it is a folder")
        target, is_direct = _target_of(path)
        above = next((parent for parent in target.parents if parent.exists()), None)
        if above is not None and not above.is_dir():
            raise UserError(f"{path}: cannot be written: {above} is no folder")
        # a file is written beside the one that it replaces, and takes its place at the end
        if above is not None and not is_direct and not os.access(above, os.W_OK | os.X_OK):
            raise UserError(f"{path}: cannot be written: the folder {above} is read-only here")
        if not is_direct and target.exists() and not os.access(target, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def check_text_name(path: Path) -> None:
    """Raise UserError for a path that is not UTF-8 text, for libraries that take no other path."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise UserError(f"{path}: the name of a table must be a text in UTF-8") from None


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all; raise UserError where it cannot be."""
    try:
        content = text.encode()
    except UnicodeEncodeError as error:
        name = error.object[max(0, error.start - 40) : error.end]
        raise UserError(f"{path}: cannot be written: {name!r} in it is no text in UTF-8") from None
    write_bytes(path, content)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file whole or not at all; raise UserError where it cannot be."""
    write_files({path: content})


def write_files(contents: Mapping[Path, bytes]) -> None:
    """Write files that belong together: all are on disk under other names before the first one is renamed.

    Raises UserError if one of them cannot be written; then none is.
    """
    written: list[_Writing] = []
    with ExitStack() as stack:
        for path, content in contents.items():
            with _reported(path):
                same = [other.path for other in written if other.target == _target_of(path)[0]]
                if same:
                    raise UserError(f"{path}: cannot be written: it is the same file as {same[0]}")
                writing = _Writing(path)
                stack.callback(writing.discard)
                written.append(writing)
                writing.stream.write(content)
                writing.sync()
        for writing in written:
            with _reported(writing.path):
                writing.commit()


@contextmanager
def writing(path: Path) -> Iterator[IO[bytes]]:
    """Provide a stream for writing a file, which appears at its path once the context ends without an error.

    Waits for another process that is writing the same file. Raises UserError if the file cannot be written.
    """
    with _reported(path):
        partial = _Writing(path)
    try:
        yield partial.stream
        with _reported(path):
            partial.sync()
            partial.commit()
    finally:
        partial.discard()


@contextmanager
def _reported(path: Path | str) -> Iterator[None]:
    """Convert an OSError, or a ValueError for a name that no file system allows, to a UserError that names the file."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from None
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{path}: cannot be written: {error}") from None


class _Writing:
    """A file being written: under another name until it is committed, or directly if it is a device or a pipe."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.target, self._is_direct = _target_of(path)
        self._partial: Path | None = None
        check_place(path)
        if self._is_direct:
            handle = os.open(path, os.O_WRONLY | os.O_APPEND | getattr(os, "O_NOCTTY", 0))
        else:
            self.target.parent.mkdir(parents=True, exist_ok=True)
            handle = _claimed_partial(partial_path(self.target))
            self._partial = partial_path(self.target)
        self.stream: IO[bytes] = os.fdopen(handle, "wb")
        if self._partial is not None:
            try:
                self._copy_owner_and_mode()
            except BaseException:
                self.discard()
                raise

    def _copy_owner_and_mode(self) -> None:
        """Give the new file the owner and the mode of the one that it replaces."""
        try:
            before = self.target.stat()
        except FileNotFoundError:
            return
        if not os.access(self.target, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        if hasattr(os, "fchmod"):
            with suppress(PermissionError):  # only root may give files to others
                os.fchown(self.stream.fileno(), before.st_uid, before.st_gid)
            os.fchmod(self.stream.fileno(), stat.S_IMODE(before.st_mode))

    def sync(self) -> None:
        """Flush the content to disk."""
        self.stream.flush()
        if not self._is_direct:
            os.fsync(self.stream.fileno())

    def commit(self) -> None:
        """Rename the partial file to its target."""
        if self._partial is not None:
            self._partial.replace(self.target)
            self._partial = None
            sync_folder(self.target.parent)

    def discard(self) -> None:
        """Close the file, and remove it if it is not committed."""
        if self._partial is not None:
            self._partial.unlink(missing_ok=True)
            self._partial = None
        with suppress(OSError):  # a failed write has been reported already
            self.stream.close()


def partial_path(target: Path) -> Path:
    """Return the path of a partial file.

    >>> partial_path(Path("out/table.csv")).name
    '.gssim-bf5b449ed8c18503.partial'
    """
    return target.with_name(f".gssim-{hashlib.sha256(os.fsencode(target.name)).hexdigest()[:16]}.partial")


def sync_folder(folder: Path) -> None:
    """Sync a folder's entries to disk, if the file system supports it."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _target_of(path: Path) -> tuple[Path, bool]:
    """Return (file to replace, False), or (path, True) if it is written directly: a device, pipe or open descriptor."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):  # also for a dangling link
        mode = stat.S_IFREG
    if stat.S_ISCHR(mode) or stat.S_ISFIFO(mode) or _is_descriptor(path):
        return path, True
    if stat.S_ISBLK(mode) or stat.S_ISSOCK(mode):
        raise UserError(f"{path}: cannot be written: it is a {'disk' if stat.S_ISBLK(mode) else 'socket'}")
    return Path(os.path.realpath(path)), False


def _is_descriptor(path: Path) -> bool:
    """Return whether a path names a process's open descriptor, as /dev/stdout does, which must not be replaced."""
    for _ in range(MOST_LINKS):
        if re.fullmatch(r"/proc/[^/]+(/task/[^/]+)?/fd", os.path.realpath(path.parent)):
            return True
        if not path.is_symlink():
            return False
        path = path.parent / path.readlink()
    return False


def _claimed_partial(partial: Path) -> int:
    """Return the handle of a new, locked partial file; one left by a killed writer is removed."""
    flags = os.O_RDWR | getattr(os, "O_NOFOLLOW", 0)
    while True:
        try:
            handle = os.open(partial, flags | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            _remove_stale(partial)
            continue
        _lock(handle)
        if _is_at(handle, partial):
            return handle
        os.close(handle)  # another writer has taken it for abandoned and removed it


def remove_partial(path: Path) -> None:
    """Remove the partial file of a killed writer, if any; raise UserError where that is impossible."""
    with _reported(path):
        _remove_stale(partial_path(Path(os.path.realpath(path))))


def _remove_stale(partial: Path) -> None:
    """Wait for the lock of a partial file, and remove the file if its writer has died."""
    try:
        handle = os.open(partial, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        return
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            raise UserError(f"{partial}: is in the way, and none of gssim's: remove it")
        _lock(handle)
        if _is_at(handle, partial):
            partial.unlink()
    finally:
        os.close(handle)


# Locks ----------------------------------------------------------------------------------------------------------------


def _lock(handle: int, *, wait: bool = True) -> bool:
    """Lock an open file; return whether no other process has locked it (always true without locking)."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL):
            raise
    return True


def _is_at(handle: int, path: Path) -> bool:
    """Return whether an open file is the one at this path."""
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    except FileNotFoundError:
        return False


def held_lock(lock: Path, said: str = "") -> int | None:
    """Acquire a lock file and return its handle; None if another process holds it.

    `said`: content of the file, for other processes to show. Release it with `release_lock`. A process that inherits
    the handle holds the lock too.
    """
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    while True:
        handle = os.open(lock, flags, 0o644)
        if not _lock(handle, wait=False):
            os.close(handle)
            return None
        if _is_at(handle, lock):
            os.truncate(handle, 0)
            os.pwrite(handle, said.encode(), 0)
            return handle
        os.close(handle)  # the former holder has removed it meanwhile


def release_lock(lock: Path, handle: int) -> None:
    """Remove a lock file that this process holds."""
    lock.unlink(missing_ok=True)
    os.close(handle)


@contextmanager
def locked(lock: Path, *, place: str) -> Iterator[int]:
    """Hold the lock of an output, `place`, within the context; yield the lock's handle, which children may inherit.

    Raises UserError if another process holds it, which the message names. At the end the lock file, and folders that
    were made for it, are removed; a killed process leaves the file behind, unlocked.
    """
    with _reported(place):
        made = [folder for folder in lock.parents if not folder.exists()]
        lock.parent.mkdir(parents=True, exist_ok=True)
        if lock.exists() and (not lock.is_file() or _holder(lock) is None):
            raise UserError(f"{lock}: is in the way, and no lock of gssim's: remove it")
        command = shlex.join([os.path.basename(sys.argv[0]), *sys.argv[1:]])
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "command": command[:200]}
        handle = held_lock(lock, json.dumps({"gssim_lock": holder}))
    if handle is None:
        raise UserError(
            f"{place}: is in use by {_holder(lock) or 'another process'}; wait for it, or name another place"
        )
    try:
        yield handle
    finally:
        release_lock(lock, handle)
        for folder in made:
            with suppress(OSError):
                folder.rmdir()


def _holder(lock: Path) -> str | None:
    """Return the description of a lock file's holder; empty if not written yet; None if the file is not one of ours."""
    try:
        content = lock.read_text(encoding="utf-8")
        holder = json.loads(content)["gssim_lock"] if content else None
        return f"process {holder['pid']} on {holder['host']} ({holder['command']})" if holder else ""
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


# Temporary folders ----------------------------------------------------------------------------------------------------


@contextmanager
def scratch_folder(prefix: Prefix = "gssim-run-", *, inside: Path | None = None) -> Iterator[Path]:
    """Provide a temporary folder, which is removed when the context ends. Folders of killed processes are removed
    first.

    `inside`: parent folder; None: the default folder for temporary files.
    """
    remove_abandoned(inside)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=inside))
        try:
            handle = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:
            continue  # another process took it for abandoned, and removed it before it was locked
        if _lock(handle, wait=False) and _is_at(handle, folder):
            (folder / FOLDER_MARK).touch()
            break
        os.close(handle)
    try:
        yield folder
    finally:
        _remove_marked(folder)
        os.close(handle)


def remove_abandoned(inside: Path | None = None) -> list[Path]:
    """Remove our temporary folders whose process has died, and return them.

    A folder is ours if it has our mark, or if it is empty because its process died before marking it.
    """
    removed = []
    above = inside or Path(tempfile.gettempdir())
    for name in os.listdir(above) if above.is_dir() and fcntl is not None else ():
        folder = above / name
        if not OUR_NAME.fullmatch(name):
            continue
        with suppress(OSError):
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                continue
            names = os.listdir(folder)
            if names and FOLDER_MARK not in names:
                continue
            handle = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                if _lock(handle, wait=False) and _is_at(handle, folder):
                    _remove_marked(folder)
                    removed.append(folder)
            finally:
                os.close(handle)
    return removed


def _remove_marked(folder: Path) -> None:
    """Remove a temporary folder of ours, its mark last.

    If this process is killed meanwhile, or a dying process still writes into the folder, a later process finds the rest
    by the mark.
    """
    with suppress(OSError):  # remove as much as possible
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != FOLDER_MARK:
                path.unlink(missing_ok=True)
        if {FOLDER_MARK}.issuperset(os.listdir(folder)):  # nothing was written into it meanwhile
            shutil.rmtree(folder, ignore_errors=True)


def _similar_file(path: Path) -> str:
    """Return a question for a file that is there: of a similar name, or of the same name in a folder below."""
    folder = path.parent
    if not folder.is_dir():
        return ""
    close = nearest_name(path.name, os.listdir(folder))
    name = glob.escape(path.name)
    below = () if close else sorted((*folder.glob(f"*/{name}"), *folder.glob(f"*/{name}.toml")))
    found = folder / close if close else next(iter(below), None)
    return f"; did you mean {found}?" if found else ""


def read_text(path: Path) -> str:
    """Return the text of a file in UTF-8, without a byte-order mark; raise UserError where it cannot be read."""
    try:
        size = path.stat().st_size
        content = b""
        if excess("file_bytes", size) is None:
            with path.open("rb") as stream:  # a device or a pipe has no size
                content = stream.read(-1 if is_lifted() else LIMITS["file_bytes"][0] + 1)
        if (why := excess("file_bytes", max(size, len(content)))) is not None:
            raise UserError(f"{path}: {why}")
        return io.TextIOWrapper(io.BytesIO(content), encoding="utf-8-sig").read()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file{_similar_file(path)}") from None
    except IsADirectoryError:
        raise UserError(f"{path}: is a folder, not a file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: cannot be read: it is no text in UTF-8: {error.reason}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:  # a name with a character that no file system allows
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: cannot be read: {error}") from None


MOST_LEVELS = 100
"""Most levels of tables and arrays in a file: they are gone through level by level in nested calls, whose depth Python
limits to a thousand."""


def is_nested_too_deep(value: object) -> bool:
    """Return whether tables and arrays are nested deeper than any file needs (a dotted key nests without brackets).

    >>> is_nested_too_deep({"a": [{"b": 1}]})
    False
    """
    level = [value]
    for _ in range(MOST_LEVELS):
        tables = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        if not tables:
            return False
        level = [item for table in tables for item in table if isinstance(item, dict | list)]
    return bool(level)


def read_json(path: Path, *, by_hand: bool = False) -> Any:
    """Return the content of the JSON file `path`; raise UserError where it is missing or invalid.

    `by_hand`: people write such files, and a key that is given twice in one table is a mistake.
    """
    return parsed_json(read_text(path), file=str(path), by_hand=by_hand)


def refuse_repeated_keys(file: str) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    """Return an `object_pairs_hook` for `json.loads` that raises UserError for a key that occurs twice in an object."""

    def table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content = dict(pairs)
        if len(content) < len(pairs):
            names = [key for key, _ in pairs]
            twice = next(key for key in names if names.count(key) > 1)
            raise UserError(f"{file}: {one_line(twice, 60)}: is given twice in one table")
        return content

    return table


def parsed_json(content: str | bytes, *, file: str, by_hand: bool = False) -> Any:
    """Return the parsed content of a JSON file; raise UserError where it is invalid. `by_hand`: see `read_json`."""
    try:
        return json.loads(content, object_pairs_hook=refuse_repeated_keys(file) if by_hand else None)
    except UserError:  # a ValueError too
        raise
    except (ValueError, RecursionError) as error:  # not JSON, a number of thousands of digits, brackets nested too deep
        raise UserError(f"{file}: not a JSON file: {error}") from None


FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")
"""Beginnings of texts that spreadsheets treat as formulas; see [Note: formulas]."""


def as_text_cell(text: str) -> str:
    """Return a text as a CSV cell that no spreadsheet treats as a formula; see [Note: formulas].

    >>> as_text_cell("=1+1"), as_text_cell("gs"), of_text_cell("'=1+1"), of_text_cell("it's")
    ("'=1+1", 'gs', '=1+1', "it's")
    """
    return f"'{text}" if text.startswith((*FORMULA_STARTS, "'")) else text


def of_text_cell(cell: str) -> str:
    """Return the text of a cell: the inverse of `as_text_cell`."""
    return cell[1:] if cell.startswith("'") and cell[1:].startswith((*FORMULA_STARTS, "'")) else cell


def read_rows(
    path: Path, needed: Sequence[str] = (), what: str = "a table"
) -> tuple[tuple[str, ...], list[dict[str, str]]]:
    """Return the columns of a CSV file, and its rows by column; missing cells are empty texts.

    Raises UserError if the file is missing, or lacks a column of `needed`; the message then says that it is not `what`.
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
    """Return the number in a row's column, None if it is empty; raise UserError if it is not a finite number."""
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
