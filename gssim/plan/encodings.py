"""Encodings of thresholded messages (COO, bitmap, dense) and their sizes, shared by the simulator and the real backend.

A message holds `entries` of the `elements` of an owner's range, v bytes each:

    coo:     entries * (v + 4)            values, and int32 indices relative to the range
    bitmap:  entries * v + elements / 8   values, and a bit for every element of the range
    dense:   elements * v                 the whole range, with zeros where nothing is sent
"""

import math

import numpy as np

from gssim.errors import UserError
from gssim.units import Floats, Ints

INDEX_BYTES = 4
"""Size of the int32 index of a COO entry, relative to the owner's range."""
MOST_INDEXED = 2**31
"""Elements of the longest range that such an index can address."""
ENCODINGS = ("dense", "bitmap", "coo")
"""All encodings; of those with equally many bytes, the first is used."""

CHUNK_ELEMENTS = 2**16
"""On a CPU, entries are selected and packed in chunks of this many elements, which fit in a cache."""
SAMPLE_ELEMENTS = 2**16
"""A target density's threshold is estimated from at most this many of a tensor's elements."""
FOLLOWED_ENTRIES, LEAST_FOLLOWED_ELEMENTS = 256, 2**12
"""Between two estimates a bucket's thresholds follow a sample of its elements: of so many that are expected to be sent,
which leaves a relative standard error of 6 %, and of at least so many."""


def followed_elements(density: float, elements: int) -> int:
    """Return of how many of a bucket's elements a sample is taken, in a step between two estimates of its thresholds.

    >>> [followed_elements(density, 10**6) for density in (0.5, 0.01, 0.0001)]
    [4096, 25600, 65536]
    """
    wanted = max(LEAST_FOLLOWED_ELEMENTS, round(FOLLOWED_ENTRIES / density))
    return min(elements, SAMPLE_ELEMENTS, wanted)


def message_bytes(encoding: str, *, entries: float, elements: float, value_bytes: int) -> float:
    """Return the bytes of one message in an encoding that is not `auto`; `entries` may be an expectation.

    >>> [message_bytes(e, entries=100, elements=1000, value_bytes=4) for e in ("coo", "bitmap", "dense")]
    [800.0, 525.0, 4000.0]
    """
    sizes = {
        "coo": entries * (value_bytes + INDEX_BYTES),
        "bitmap": entries * value_bytes + math.ceil(elements / 8),
        "dense": elements * value_bytes,
    }
    return float(sizes[encoding])


def chosen(encoding: str, *, entries: float, elements: float, value_bytes: int) -> str:
    """Return the encoding of a message: the requested one, or (`auto`) the smallest that can address its elements.

    Raises UserError where COO is requested for a range that is too long for its indices.

    >>> [chosen("auto", entries=entries, elements=1000, value_bytes=4) for entries in (10, 100, 980)]
    ['coo', 'bitmap', 'dense']
    """
    if encoding == "coo" and elements > MOST_INDEXED:
        raise UserError(coo_range_error(elements))
    if encoding != "auto":
        return encoding
    usable = ENCODINGS if elements <= MOST_INDEXED else ("dense", "bitmap")
    return min(usable, key=lambda e: message_bytes(e, entries=entries, elements=elements, value_bytes=value_bytes))


def sizes_of(encoding: str, *, entries: Floats, elements: Floats, value_bytes: int) -> tuple[Ints, Floats]:
    """Return the encodings (as indices in `ENCODINGS`) and the bytes of many messages, as `chosen` and `message_bytes`.

    >>> kinds, sizes = sizes_of("auto", entries=np.array([10., 100., 980.]), elements=np.full(3, 1000.), value_bytes=4)
    >>> [ENCODINGS[kind] for kind in kinds], sizes.tolist()
    (['coo', 'bitmap', 'dense'], [80.0, 525.0, 4000.0])
    """
    too_long = elements > MOST_INDEXED
    if encoding == "coo" and too_long.any():
        raise UserError(coo_range_error(float(elements.max())))
    sizes = {
        "coo": lambda: entries * (value_bytes + INDEX_BYTES),
        "bitmap": lambda: entries * value_bytes + np.ceil(elements / 8),
        "dense": lambda: elements * float(value_bytes),
    }
    if encoding != "auto":
        return np.full(entries.shape, ENCODINGS.index(encoding)), sizes[encoding]()
    several = np.stack([sizes[each]() for each in ENCODINGS])
    several[ENCODINGS.index("coo")][too_long] = np.inf
    kinds = several.argmin(axis=0)
    return kinds, np.take_along_axis(several, kinds[None], axis=0)[0]


def coo_range_error(elements: float) -> str:
    """Return the error message for a range of too many elements for COO."""
    return (
        f"encoding = 'coo': has int32 indices, for at most {MOST_INDEXED:,} elements of an owner's range, which has "
        f"{elements:,.0f}; allowed: auto, bitmap, dense, or smaller shards"
    )


def scratch_elements(part: int, bucket: int, *, chunked: bool) -> tuple[int, int]:
    """Return the workspace, as (flags, magnitudes), for selecting and packing messages of at most `part` elements.

    `bucket`: the most elements of a bucket. Flags are bits, padded to whole bytes; magnitudes are computed chunk by
    chunk (`chunked`), or for a whole message at once.
    """
    flags, whole = 8 * math.ceil(part / 8), 8 * math.ceil(bucket / 8)
    return flags, min(whole, CHUNK_ELEMENTS) if chunked else max(flags, min(whole, SAMPLE_ELEMENTS))
