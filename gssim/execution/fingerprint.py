"""Fingerprints of code, which identify the version that made a prediction or a measurement."""

import hashlib
import os
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

SUFFIXES = (".py", ".toml", ".json", ".cpp")
"""Suffixes of the files that determine a package's behaviour."""
NUMERICS = ("simpy", "numpy", "scipy")
"""Packages whose version may change a prediction."""
SHOWN = 16
"""Number of digits of a digest that provenance shows."""


@cache
def package_digest(package: str) -> str:
    """Return the digest of a package's files: its sources and the data beside them. The package is not imported.

    Raises ModuleNotFoundError where it is not installed.
    """
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"no package {package}", name=package)
    digest = hashlib.sha256()
    for root in spec.submodule_search_locations:
        for folder, inner, names in os.walk(root):
            inner.sort()
            for name in sorted(name for name in names if name.endswith(SUFFIXES)):
                place = os.path.join(folder, name)
                with open(place, "rb") as file:
                    content = file.read()
                digest.update(f"{os.path.relpath(place, root)} {len(content)}\n".encode() + content)
    return digest.hexdigest()


@cache
def code_digest() -> str:
    """Return the digest of the simulator: its package, presets included, and the versions of its numerical packages."""
    versions = [f"{name} {installed_version(name)}" for name in NUMERICS]
    return hashlib.sha256("\n".join([package_digest("gssim"), *versions]).encode()).hexdigest()


@cache
def installed_version(package: str) -> str:
    """Return the version of an installed package, or that it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
