"""The ids that tokens of an organization have: a time and something random, in base 62."""

from __future__ import annotations

import secrets
import string

EPOCH_SECONDS = 1_400_000_000
CHARACTERS = 27
_RANDOM_BYTES = 16
_DIGITS = string.digits + string.ascii_uppercase + string.ascii_lowercase


def new(second: int) -> str:
    """Make an id of a time, in seconds since the epoch."""
    number = int.from_bytes((second - EPOCH_SECONDS).to_bytes(4) + secrets.token_bytes(_RANDOM_BYTES))
    digits = ""
    for _ in range(CHARACTERS):
        number, digit = divmod(number, len(_DIGITS))
        digits = _DIGITS[digit] + digits
    return digits


def second(text: str) -> int | None:
    """Give the time in an id, None when it is none."""
    if len(text) != CHARACTERS or not set(text) <= set(_DIGITS):
        return None
    number = 0
    for digit in text:
        number = number * len(_DIGITS) + _DIGITS.index(digit)
    seconds = number >> 8 * _RANDOM_BYTES
    return EPOCH_SECONDS + seconds if seconds < 2**32 else None
