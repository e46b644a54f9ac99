"""Writes files whole or not at all, locks outputs against a second writer, and keeps temporary folders.

[Note: what is ours] A file is written under another name in its own folder, synced, and renamed. That name follows
from the file's, so that the next writer of the same file finds and replaces what a killed one has left. Nothing else is
removed: an existing device or pipe is written to, a symbolic link is followed, and a lock, a partial file or a
temporary folder is taken away only where it bears our mark and nobody holds its lock, which the kernel releases with
its process.

Files that are read whole: their text, what JSON says, the rows of CSV; what is wrong with them is a UserError.

[Note: formulas] Spreadsheets take a cell that begins with one of `=+-@` for a formula, and may run what it says. So
texts that do are written with an apostrophe before them, as spreadsheets themselves mark text, and read without.
"""

import csv
import errno
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from gssim.errors import UserError
from gssim.limits import excess

try:
    import fcntl
except ImportError:  # Windows has none: there nothing is locked
    fcntl = None  # type: ignore[assignment]

FOLDER_MARK = ".gssim-scratch"
"""File that marks a temporary folder of ours."""
PREFIXES = ("gssim-run-", "gsreal-run-")
"""Of the names of temporary folders; nothing else makes folders so named."""
MOST_LINKS = 40
"""Symbolic links that lead from one to the next, as in the kernel."""


# Writing --------------------------------------------------------------------------------------------------------------


def check_place(path: Path) -> None:
    """Raise UserError where no file can be written at `path`: said before the work whose outcome would have no place.

    A folder that is not there yet is made by whoever writes.
    """
    with _reported(path):
        if path.is_dir():
            raise UserError(f"{path}: cannot be written: it is a folder")
        target, _ = _target_of(path)
        above = next((parent for parent in target.parents if parent.exists()), None)
        if above is not None and not above.is_dir():
            raise UserError(f"{path}: cannot be written: {above} is no folder")


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all; raise UserError where it cannot be."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file whole or not at all; raise UserError where it cannot be."""
    write_files({path: content})


def write_files(contents: Mapping[Path, bytes]) -> None:
    """Write files that belong together: all are on the disk under other names before the first gets its own.

    Raises UserError where one of them cannot be written; then none is.
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
    """Give a stream to write a file with, which is there once the context ends without an error.

    Another process that writes the same file meanwhile is waited for. Raises UserError where it cannot be written.
    """
    with _reported(path):
        begun = _Writing(path)
    try:
        yield begun.stream
        with _reported(path):
            begun.sync()
            begun.commit()
    finally:
        begun.discard()


@contextmanager
def _reported(path: Path) -> Iterator[None]:
    """Raise what the operating system refuses as a UserError that names the file."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from None


class _Writing:
    """A file that is being written: under another name until it is committed, unless it is a device or a pipe."""

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
                self._take_over()
            except BaseException:
                self.discard()
                raise

    def _take_over(self) -> None:
        """Give the new file the mode and the owner of the one that it replaces."""
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
        """Bring what was written to the disk."""
        self.stream.flush()
        if not self._is_direct:
            os.fsync(self.stream.fileno())

    def commit(self) -> None:
        """Give the file its name."""
        if self._partial is not None:
            self._partial.replace(self.target)
            self._partial = None
            sync_folder(self.target.parent)

    def discard(self) -> None:
        """Close the file; one that is not committed is gone."""
        if self._partial is not None:
            self._partial.unlink(missing_ok=True)
            self._partial = None
        with suppress(OSError):  # of what could not be written, which is known already
            self.stream.close()


def partial_path(target: Path) -> Path:
    """Return where a file stands while it is written.

    >>> partial_path(Path("out/table.csv")).name
    '.gssim-bf5b449ed8c18503.partial'
    """
    return target.with_name(f".gssim-{hashlib.sha256(os.fsencode(target.name)).hexdigest()[:16]}.partial")


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk, where the file system does that."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _target_of(path: Path) -> tuple[Path, bool]:
    """Return the file that is replaced, or (path, True) where it is written to: a device, pipe or open descriptor."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):  # also of a link that leads nowhere yet
        mode = stat.S_IFREG
    if stat.S_ISCHR(mode) or stat.S_ISFIFO(mode) or _is_descriptor(path):
        return path, True
    if stat.S_ISBLK(mode) or stat.S_ISSOCK(mode):
        raise UserError(f"{path}: cannot be written: it is a {'disk' if stat.S_ISBLK(mode) else 'socket'}")
    return Path(os.path.realpath(path)), False


def _is_descriptor(path: Path) -> bool:
    """Return whether a path names what a process has open, as /dev/stdout does: that is not to be replaced."""
    for _ in range(MOST_LINKS):
        if re.fullmatch(r"/proc/[^/]+(/task/[^/]+)?/fd", os.path.realpath(path.parent)):
            return True
        if not path.is_symlink():
            return False
        path = path.parent / path.readlink()
    return False


def _claimed_partial(partial: Path) -> int:
    """Return the open partial file, new and locked; what a killed writer has left is taken away."""
    flags = os.O_RDWR | getattr(os, "O_NOFOLLOW", 0)
    while True:
        try:
            handle = os.open(partial, flags | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            _take_away(partial)
            continue
        _lock(handle)
        if _is_at(handle, partial):
            return handle
        os.close(handle)  # another writer held it for a dead one's


def remove_partial(path: Path) -> None:
    """Remove what a killed writer of a file has left, if anything; raise UserError where that cannot be."""
    with _reported(path):
        _take_away(partial_path(Path(os.path.realpath(path))))


def _take_away(partial: Path) -> None:
    """Wait for who writes a partial file, and remove it where he is dead."""
    try:
        handle = os.open(partial, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        return
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
            raise UserError(f"{partial}: is in the way, and none of gssim's: remove it")
        _lock(handle)
        if _is_at(handle, partial):
            partial.unlink()
    finally:
        os.close(handle)


# Locks ----------------------------------------------------------------------------------------------------------------


def _lock(handle: int, *, wait: bool = True) -> bool:
    """Lock an open file; return whether nobody else has it. Where nothing can be locked, nobody has it."""
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
    """Return whether an open file is the one of this name."""
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    except FileNotFoundError:
        return False


def held_lock(lock: Path, said: str = "") -> int | None:
    """Return the handle of a lock file that this process holds from now on; None where another process does.

    `said`: what the file is to tell others. To be given back by `release_lock`; a process that inherits the handle
    holds the lock too.
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
        os.close(handle)  # who had it took it away meanwhile


def release_lock(lock: Path, handle: int) -> None:
    """Take a lock file away that this process holds."""
    lock.unlink(missing_ok=True)
    os.close(handle)


@contextmanager
def locked(lock: Path, *, place: str) -> Iterator[int]:
    """Hold the lock of an output, `place`, as long as the context lasts; raise UserError where another process does.

    The message names that process. Nothing is left afterwards, no folder either that was made for the lock alone; of a
    killed process, a file that no longer locks anything. Gives the lock's handle, for processes that shall hold it too.
    """
    made = [folder for folder in lock.parents if not folder.exists()]
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        if lock.exists() and (not lock.is_file() or _holder(lock) is None):
            raise UserError(f"{lock}: is in the way, and no lock of gssim's: remove it")
        handle = held_lock(lock, _said_of_this_process())
    except OSError as error:
        raise UserError(f"{place}: cannot be written: {error.strerror or error}") from None
    if handle is None:
        holder = _holder(lock) or "another process"
        raise UserError(f"{place}: is in use by {holder}; wait for it, or name another place")
    try:
        yield handle
    finally:
        release_lock(lock, handle)
        for folder in made:
            with suppress(OSError):
                folder.rmdir()


def _said_of_this_process() -> str:
    command = shlex.join([os.path.basename(sys.argv[0]), *sys.argv[1:]])
    return json.dumps({"gssim_lock": {"pid": os.getpid(), "host": socket.gethostname(), "command": command[:200]}})


def _holder(lock: Path) -> str | None:
    """Return who wrote a lock file, in words; empty where nobody has yet; None where it is none of ours."""
    try:
        said = lock.read_text(encoding="utf-8")
        held = json.loads(said)["gssim_lock"] if said else None
        return f"process {held['pid']} on {held['host']} ({held['command']})" if held else ""
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


# Temporary folders ----------------------------------------------------------------------------------------------------


@contextmanager
def scratch_folder(prefix: str = PREFIXES[0], *, inside: Path | None = None) -> Iterator[Path]:
    """Give a temporary folder, which is gone when the context ends; what killed processes have left goes before.

    `inside`: where it is made, if not where temporary folders are.
    """
    remove_abandoned(inside)
    made, handle = _made_scratch(prefix, inside)
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
        os.close(handle)


def _made_scratch(prefix: str, inside: Path | None) -> tuple[Path, int]:
    """Return a new, marked folder and the handle that holds its lock."""
    while True:
        made = Path(tempfile.mkdtemp(prefix=prefix, dir=inside))
        try:
            handle = os.open(made, os.O_RDONLY)
        except FileNotFoundError:
            continue  # taken for an abandoned one before it was locked
        if _lock(handle, wait=False) and _is_at(handle, made):
            (made / FOLDER_MARK).touch()
            return made, handle
        os.close(handle)


def remove_abandoned(inside: Path | None = None) -> list[Path]:
    """Remove temporary folders of ours whose process is dead; return which.

    A folder bears our mark, or it is empty, as a process leaves it that dies before it has marked it.
    """
    removed = []
    above = inside or Path(tempfile.gettempdir())
    for name in os.listdir(above) if above.is_dir() and fcntl is not None else ():
        folder = above / name
        if not name.startswith(PREFIXES) or not _is_ours(folder):
            continue
        with suppress(OSError):
            handle = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                if _lock(handle, wait=False) and _is_at(handle, folder):
                    shutil.rmtree(folder, ignore_errors=True)
                    removed.append(folder)
            finally:
                os.close(handle)
    return removed


def _is_ours(folder: Path) -> bool:
    """Return whether a folder is a temporary one of this user's that we have made."""
    try:
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            return False
        names = os.listdir(folder)
    except OSError:
        return False
    is_named = any(re.fullmatch(rf"{prefix}[a-z0-9_]{{8}}", folder.name) for prefix in PREFIXES)
    return is_named and (FOLDER_MARK in names or not names)


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
