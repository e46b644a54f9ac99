"""What torch's sums over rows take on a GPU: many blocks of threads share the rows, and meet in a buffer.

Source: torch 2.11, aten/src/ATen/native/cuda/Reduce.cuh (setReduceConfig, ReduceConfig.global_memory_size), for sums of
contiguous rows. The peaks of nine runs of four models on an H200 agree to 512 bytes.
"""

LARGEST_BLOCK_THREADS = 512
WARP_THREADS = 32
VECTOR = 4
"""Of neighbouring columns, a thread adds up as many, or fewer where their number is no multiple of it."""
LEAST_ROWS, MOST_ROWS = 16, 256
"""That a thread adds up: at least so many where rows are shared among blocks, and at most where these suffice."""


def reduction_buffer_bytes(rows: int, columns: int, *, value_bytes: int, resident_threads: int | None) -> int:
    """Return the bytes of the buffer for the sums of all columns over rows; 0 where no rows are shared among blocks.

    `value_bytes`: of what is added up in, which is fp32 for half precisions; `resident_threads`: that the device runs
    at once; None: enough for all blocks. Each block has room for its own columns once for every column there is: with
    threads enough, and columns a multiple of 128, the buffer is twice the bytes of what is summed.

    >>> reduction_buffer_bytes(8192, 384, value_bytes=4, resident_threads=None) // 2**20
    24
    """
    vector = next(size for size in (VECTOR, 2, 1) if columns % size == 0)
    width, height = _block(columns // vector, rows, LARGEST_BLOCK_THREADS // vector)
    rows_of_thread = -(-rows // height)
    blocks = -(-(columns // vector) // width)
    at_once = blocks * rows if resident_threads is None else resident_threads // (width * height)
    if rows_of_thread < MOST_ROWS or blocks > at_once:
        return 0
    shared_by = max(min(-(-at_once // blocks), -(-rows_of_thread // LEAST_ROWS)), -(-rows_of_thread // MOST_ROWS))
    return value_bytes * columns * shared_by * width * vector if shared_by > 1 else 0


def _block(columns: int, rows: int, threads: int) -> tuple[int, int]:
    """Return a block's threads along columns (vectors of them) and rows: powers of two, a warp wide if both allow."""
    most_wide, most_high = (min(threads, 1 << (count.bit_length() - 1)) for count in (columns, rows))
    height = min(most_high, threads // min(most_wide, WARP_THREADS))
    return min(most_wide, threads // height), height
