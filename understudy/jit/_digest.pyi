"""XXH3-64 of files."""

def of_file(file: int) -> tuple[int, str]:
    """Bytes of an open file, from its beginning to its end, and the digest of these in 16 hexadecimal digits.

    Raises OSError.
    """
