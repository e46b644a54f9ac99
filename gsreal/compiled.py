"""Compiles the few C++ sources of this package on first use, and caches the results."""

import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from gssim.errors import UserError
from gssim.execution.files import scratch_folder

SCRATCH_KERNELS = "torchinductor"
"""Name of a folder for kernels that torch creates when it is imported; the folder is removed with the command."""


def compiler() -> str | None:
    """Return the C++ compiler to use, if there is one."""
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")


def cache_folder() -> Path:
    """Return the folder in which generated files are kept for later runs; raise UserError if the user has none."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(home):  # others are to be ignored, says the specification
        return Path(home) / "gsreal"
    try:
        return Path.home() / ".cache" / "gsreal"
    except RuntimeError:
        raise UserError("this user has no home: name a folder for what is kept with XDG_CACHE_HOME") from None


def compiled(source: Path, flags: Sequence[str] = (), *, version: str = "") -> Path | None:
    """Return the compiled file of a C++ source, or None without a compiler.

    A shared library with the flag `-shared`, else a program. It is compiled again if the file, the flags or the
    `version` of the libraries that it is linked with change.
    """
    identity = "\0".join([source.read_text(encoding="utf-8"), version, *flags])
    key = hashlib.sha256(identity.encode()).hexdigest()[:16]
    cached = cache_folder() / f"{source.stem}-{key}{'.so' if '-shared' in flags else ''}"
    return cached if cached.exists() or _compile(source, flags, cached) else None


def _compile(source: Path, flags: Sequence[str], kept: Path) -> bool:
    program = compiler()
    if program is None:
        return False
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with scratch_folder("gsreal-run-", inside=kept.parent) as folder:
            output = folder / kept.name
            command = [program, "-std=c++20", "-O2", str(source), "-o", str(output), *flags]
            if subprocess.run(command, capture_output=True, check=False).returncode:
                return False
            output.replace(kept)
    except OSError as error:
        raise UserError(
            f"{kept.parent}: cannot be written: {error.strerror}: compiled code is kept there; name another "
            "folder with XDG_CACHE_HOME"
        ) from None
    return True
