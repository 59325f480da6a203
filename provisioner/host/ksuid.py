"""KSUIDs: 27 characters of base62 that start with a time. Choria takes them for the ids of tokens."""

from __future__ import annotations

PAYLOAD_BYTES = 16

_EPOCH_SECONDS = 1_400_000_000
_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_CHARACTERS = 27


def encode(seconds: int, payload: bytes) -> str:
    """The KSUID of a time.

    :param seconds: since the Unix epoch, from the year 2014 to the year 2150
    :param payload: `PAYLOAD_BYTES` bytes that make it unique
    :raises ValueError: for other times
    """
    if not 0 <= seconds - _EPOCH_SECONDS < 2**32:
        raise ValueError("a KSUID has no such time")
    number = int.from_bytes((seconds - _EPOCH_SECONDS).to_bytes(4, "big") + payload, "big")
    digits = []
    for _ in range(_CHARACTERS):
        number, digit = divmod(number, len(_ALPHABET))
        digits.append(_ALPHABET[digit])
    return "".join(reversed(digits))
