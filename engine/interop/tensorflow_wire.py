"""The encoding of protocol buffers, as far as TensorFlow's checkpoints need it. Pure: bytes in, values out.

A message is a sequence of fields, each a number with a wire type, then a value
(https://protobuf.dev/programming-guides/encoding).
"""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import DamagedCheckpointError

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED = {_FIXED64: 8, _FIXED32: 4}
_LARGEST_FIELD = (1 << 29) - 1

Value = int | bytes
"""What a field holds: a number without a sign, or bytes, which may be text or a message."""


def read_varint(data: bytes, position: int) -> tuple[int, int]:
    """Reads a number of up to 64 bits.

    Args:
        data: The bytes.
        position: Where it begins.

    Returns:
        The number, and the position after it.

    Raises:
        DamagedCheckpointError: The bytes end too early, or it does not fit 64 bits.
    """
    value = 0
    for count in range(10):
        if position + count >= len(data):
            raise DamagedCheckpointError(f"a number at byte {position} is cut off")
        byte = data[position + count]
        value |= (byte & 127) << (7 * count)
        if byte < 128:
            if value >> 64:
                break
            return value, position + count + 1
    raise DamagedCheckpointError(f"the number at byte {position} does not fit 64 bits")


def fields(message: bytes) -> Iterator[tuple[int, Value]]:
    """Generates the numbers and values of a message's fields, in the order in which they are stored.

    Args:
        message: The message.

    Raises:
        DamagedCheckpointError: It is no message.
    """
    position = 0
    while position < len(message):
        tag, position = read_varint(message, position)
        number, wire_type = tag >> 3, tag & 7
        if not 1 <= number <= _LARGEST_FIELD:
            raise DamagedCheckpointError(f"there is no field {number} of a message")
        if wire_type == _VARINT:
            value, position = read_varint(message, position)
            yield number, value
            continue
        if wire_type == _BYTES:
            length, position = read_varint(message, position)
        elif wire_type in _FIXED:
            length = _FIXED[wire_type]
        else:
            raise DamagedCheckpointError(f"field {number} of a message has the unknown wire type {wire_type}")
        if length > len(message) - position:
            raise DamagedCheckpointError(f"field {number} of a message claims {length} bytes of {len(message)}")
        content = message[position : position + length]
        position += length
        yield number, content if wire_type == _BYTES else int.from_bytes(content, "little")


def unsigned(value: Value) -> int:
    """Returns the number that a field holds.

    Raises:
        DamagedCheckpointError: It holds bytes.
    """
    if not isinstance(value, int):
        raise DamagedCheckpointError("a message has bytes where a number belongs")
    return value


def signed(value: Value) -> int:
    """Returns the number that a field holds, in two's complement of 64 bits.

    Raises:
        DamagedCheckpointError: It holds bytes.
    """
    number = unsigned(value)
    return number - (1 << 64) if number >> 63 else number


def content(value: Value) -> bytes:
    """Returns the bytes that a field holds.

    Raises:
        DamagedCheckpointError: It holds a number.
    """
    if not isinstance(value, bytes):
        raise DamagedCheckpointError("a message has a number where bytes belong")
    return value


def text(value: Value) -> str:
    """Returns the text that a field holds.

    Raises:
        DamagedCheckpointError: It holds a number, or bytes that are no text.
    """
    try:
        return content(value).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DamagedCheckpointError(f"a message has bytes that are no text: {error}") from error
