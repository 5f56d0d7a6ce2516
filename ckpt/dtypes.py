"""What an element is: the names of element types, how wide they are and how HDF5 stores them.

Pure: no torch, no h5py. A type is named as torch names it (`float32`, `bfloat16`), `numpy:<descr>` for an array of
a numpy program, `json` or `pickle` for bytes that stand for Python objects.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# torch name -> numpy type with the same bits. Where numpy has no such type the bits are kept as unsigned integers and
# the file's attribute torch_dtype says what they mean.
_TORCH: dict[str, str] = {
    "float64": "<f8",
    "float32": "<f4",
    "float16": "<f2",
    "complex128": "<c16",
    "complex64": "<c8",
    "int64": "<i8",
    "int32": "<i4",
    "int16": "<i2",
    "int8": "|i1",
    "uint64": "<u8",
    "uint32": "<u4",
    "uint16": "<u2",
    "uint8": "|u1",
    "bool": "|b1",
    "bfloat16": "<u2",
    "complex32": "<u4",
    "float8_e4m3fn": "|u1",
    "float8_e4m3fnuz": "|u1",
    "float8_e5m2": "|u1",
    "float8_e5m2fnuz": "|u1",
    "float8_e8m0fnu": "|u1",
    "float4_e2m1fn_x2": "|u1",
}
_AS_BITS = frozenset(
    name for name in _TORCH if name == "bfloat16" or name == "complex32" or name.startswith(("float8", "float4"))
)

JSON = "json"
PICKLE = "pickle"
_NUMPY = "numpy:"
_RAW = "raw:"


@dataclass(frozen=True, slots=True)
class Storage:
    """How the file holds elements of one type.

    Args:
        dtype: numpy type of the dataset.
        per_element: dataset elements for one element of the array (more than one only for raw bytes).
        attributes: what the dataset's attributes say, so that the bits can be read rightly.
    """

    dtype: np.dtype[np.generic]
    per_element: int
    attributes: tuple[tuple[str, str], ...]


def is_object(dtype: str) -> bool:
    """Whether the bytes stand for Python objects and are no array."""
    return dtype in (JSON, PICKLE)


def of_torch(name: str) -> str | None:
    """The type's name where its bits can be kept (`torch.bfloat16` -> `bfloat16`), None where they can't."""
    short = name.removeprefix("torch.")
    return short if short in _TORCH else None


def of_numpy(dtype: np.dtype[np.generic]) -> str | None:
    """The name of a numpy type, None where its elements are references to objects."""
    if dtype.hasobject:
        return None
    if dtype.kind in "biufc" and dtype.str[1:] != "f16" and dtype.itemsize <= 16:
        return _NUMPY + dtype.str
    return _RAW + repr(np.lib.format.dtype_to_descr(dtype))


def numpy_dtype(dtype: str) -> np.dtype[np.generic]:
    """The numpy type to hold an array of this type in memory, bit for bit."""
    if is_object(dtype):
        return np.dtype(np.uint8)
    if dtype.startswith(_NUMPY):
        return np.dtype(dtype.removeprefix(_NUMPY))
    if dtype.startswith(_RAW):
        return _from_descr(dtype.removeprefix(_RAW))
    return np.dtype(_TORCH[dtype])


def _from_descr(text: str) -> np.dtype[np.generic]:
    import ast

    loaded: np.dtype[np.generic] = np.lib.format.descr_to_dtype(ast.literal_eval(text))
    return loaded


def storage(dtype: str) -> Storage:
    """How HDF5 holds this type."""
    if dtype in _TORCH:
        attributes = (("torch_dtype", dtype),) if dtype in _AS_BITS else ()
        return Storage(np.dtype(_TORCH[dtype]), 1, attributes)
    if dtype.startswith(_NUMPY):
        return Storage(numpy_dtype(dtype), 1, ())
    if dtype.startswith(_RAW):
        held = numpy_dtype(dtype)
        return Storage(np.dtype(np.uint8), held.itemsize, (("numpy_dtype", dtype.removeprefix(_RAW)),))
    raise ValueError(f"no array type: {dtype!r}")


def is_torch(dtype: str) -> bool:
    """Whether a tensor, not a numpy array, has this type."""
    return dtype in _TORCH


def torch_name(dtype: str) -> str | None:
    """The torch type of a numpy array whose bits a tensor can hold as they are; None where there is none."""
    if not dtype.startswith(_NUMPY):
        return None
    same = [name for name, held in _TORCH.items() if name not in _AS_BITS and _NUMPY + held == dtype]
    return same[0] if same else None
