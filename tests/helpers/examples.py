"""Number of examples on which a property is tested."""

import os


def examples(number: int) -> int:
    """Return `number` of examples where tests are to be thorough (GSSIM_THOROUGH), else one in five of them.

    >>> os.environ.pop("GSSIM_THOROUGH", None) and None
    >>> examples(50)
    10
    """
    return number if os.environ.get("GSSIM_THOROUGH") else max(5, number // 5)
