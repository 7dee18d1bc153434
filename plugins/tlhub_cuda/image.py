"""Device code as bytes: which kernels a cubin or PTX has, and the sizes of their parameters. Pure.

Follows the ELF-64 specification; the records of ``.nv.info`` sections are as NVIDIA's cuobjdump shows them.
"""

from __future__ import annotations

import re
import struct

from tlhub.errors import BuildError

_INFO = b".nv.info."
_SIZED_VALUE = 4  # the format of a record that is followed by its size
_PARAMETER = 0x17


def parameters(image: bytes) -> dict[str, tuple[int, ...]]:
    """Return the sizes in bytes of each kernel's parameters. Raises BuildError if *image* is torn."""
    if image[:4] != b"\x7fELF":
        return _of_ptx(image.decode("utf-8", "replace"))
    try:
        return _of_cubin(image)
    except (struct.error, LookupError, ValueError) as error:
        raise BuildError(f"nvcc wrote no sound cubin: {error}") from None


def _of_cubin(image: bytes) -> dict[str, tuple[int, ...]]:
    (start,) = struct.unpack_from("<Q", image, 40)
    size, count, strings = struct.unpack_from("<HHH", image, 58)
    headers = [struct.unpack_from("<IIQQQQ", image, start + i * size) for i in range(count)]
    names = headers[strings][4]
    found = {}
    for name, _, _, _, at, length in headers:
        text = image[names + name : image.index(b"\0", names + name)]
        if text.startswith(_INFO):
            found[text.removeprefix(_INFO).decode()] = _sizes(image[at : at + length])
    return found


def _sizes(info: bytes) -> tuple[int, ...]:
    sizes: dict[int, int] = {}
    at = 0
    while at < len(info):
        form, attribute, value = struct.unpack_from("<BBH", info, at)
        at += 4
        if form != _SIZED_VALUE:
            continue
        if attribute == _PARAMETER:
            ordinal, packed = struct.unpack_from("<4xH2xI", info, at)
            sizes[ordinal] = packed >> 18
        at += value
    return tuple(sizes[i] for i in range(len(sizes)))


_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*(?:\((.*?)\))?\s*(?=[.{])", re.DOTALL)
_PARAM = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.[a-z]+(\d+)\s[^,\[\]]*(\[\d+\])?")


def _of_ptx(text: str) -> dict[str, tuple[int, ...]]:
    return {
        name: tuple(int(bits) // 8 * int(many.strip("[]") or 1) for bits, many in _PARAM.findall(params))
        for name, params in _ENTRY.findall(text)
    }
