"""Tensors in files of torch.save (pytorch_model.bin, consolidated.00.pth), without torch, and without running a pickle.

Such a file is a zip archive: data.pkl says which tensors there are, and every storage is an uncompressed member, whose
bytes are read in place like those of a safetensors file. A pickle is a program: `_Machine` runs only the instructions
of a state dict, calls only the functions in FUNCTIONS, none of which is torch's, and takes only words and numbers as
keys. Whatever else a file asks for is an error that names it.
"""

import math
import pickletools
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import ModelLoadError, one_line, shown

SUFFIXES = (".bin", ".pt", ".pth")
MAX_PICKLE = 2**23  # bytes of data.pkl; those of the largest models have one or two million
LOCAL_HEADER = 30  # bytes of a member's own header, before its name
DTYPES = {  # class of a storage -> safetensors' name of its type, and bytes of an element
    "DoubleStorage": ("F64", 8),
    "FloatStorage": ("F32", 4),
    "HalfStorage": ("F16", 2),
    "BFloat16Storage": ("BF16", 2),
    "LongStorage": ("I64", 8),
    "IntStorage": ("I32", 4),
    "ShortStorage": ("I16", 2),
    "CharStorage": ("I8", 1),
    "ByteStorage": ("U8", 1),
    "BoolStorage": ("BOOL", 1),
}
INSIDE = ("state_dict", "model", "module")  # keys under which training frameworks put the tensors


@dataclass(frozen=True, slots=True)
class PickledTensor:
    """A tensor in an archive. start: its first element in the storage, which is the member data/`key`."""

    dtype: str
    item_bytes: int
    key: str
    start: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Storage:
    dtype: str
    item_bytes: int
    key: str
    length: int


def _tensor(storage: Any, start: Any, shape: Any, strides: Any, *_: Any) -> PickledTensor:
    if not isinstance(storage, _Storage) or not isinstance(shape, tuple) or not isinstance(strides, tuple):
        raise ValueError("a tensor without a storage")
    if not all(type(number) is int and 0 <= number < 2**48 for number in (start, *shape, *strides)):
        raise ValueError(f"a tensor of the shape {shown(shape)}")
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != step:
            raise ValueError(f"a tensor of the shape {shape} whose elements are not in order")
        step *= size
    if start + math.prod(shape) > storage.length:
        raise ValueError(f"a tensor of the shape {shape} is larger than its storage")
    return PickledTensor(storage.dtype, storage.item_bytes, storage.key, start, shape)


def _parameter(data: Any, *_: Any) -> Any:
    return data


def _dictionary(*_: Any) -> dict[Any, Any]:
    return {}


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "torch._utils _rebuild_tensor_v2": _tensor,
    "torch._utils _rebuild_parameter": _parameter,
    "collections OrderedDict": _dictionary,
}


class _Machine:
    """Runs the instructions of a pickle that only builds dictionaries, lists, numbers, words and tensors."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        """Return what the pickle builds. Raise ValueError or another plain exception if it does anything else."""
        for instruction, argument, _ in pickletools.genops(self._data):
            name = instruction.name
            if name == "STOP":
                return self._stack.pop()
            if name not in ("PROTO", "FRAME"):
                self._step(name, argument)
        raise ValueError("it has no end")

    def _step(self, name: str, argument: Any) -> None:
        stack = self._stack
        if name in ("BINUNICODE", "SHORT_BINUNICODE", "BINSTRING", "SHORT_BINSTRING", "BINFLOAT", "LONG1") or (
            name.startswith("BININT")
        ):
            stack.append(argument)
        elif name in ("NONE", "NEWTRUE", "NEWFALSE"):
            stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[name])
        elif name == "GLOBAL":
            stack.append(_found(argument))
        elif name == "STACK_GLOBAL":
            word, module = stack.pop(), stack.pop()
            stack.append(_found(f"{module} {word}"))
        elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self._memo[len(self._memo) if name == "MEMOIZE" else argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif name == "MARK":
            self._marks.append(len(stack))
        elif name in ("EMPTY_TUPLE", "EMPTY_LIST", "EMPTY_DICT"):
            stack.append({"EMPTY_TUPLE": tuple, "EMPTY_LIST": list, "EMPTY_DICT": dict}[name]())
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            stack.append(tuple(self._pop(int(name[-1]))))
        elif name == "TUPLE":
            stack.append(tuple(self._after_mark()))
        elif name in ("SETITEM", "SETITEMS"):
            items = self._pop(2) if name == "SETITEM" else self._after_mark()
            self._set(stack[-1], items)
        elif name in ("APPEND", "APPENDS"):
            items = self._pop(1) if name == "APPEND" else self._after_mark()
            if type(stack[-1]) is not list:
                raise ValueError("something is appended to what is no list")
            stack[-1].extend(items)
        elif name == "BINPERSID":
            stack.append(_storage(stack.pop()))
        elif name == "REDUCE":
            function, arguments = stack[-2], stack.pop()
            if function not in FUNCTIONS.values() or type(arguments) is not tuple:
                raise ValueError("a call of what is no function")
            stack[-1] = function(*arguments)
        elif name == "BUILD":  # attributes of a dictionary, such as _metadata
            stack.pop()
        else:
            raise ValueError(f"the instruction {name} is not supported")

    def _pop(self, count: int) -> list[Any]:
        if len(self._stack) < count:
            raise ValueError("it takes more values than it has")
        values = self._stack[-count:]
        del self._stack[-count:]
        return values

    def _after_mark(self) -> list[Any]:
        start = self._marks.pop()
        values = self._stack[start:]
        del self._stack[start:]
        return values

    @staticmethod
    def _set(target: Any, items: list[Any]) -> None:
        if type(target) is not dict or len(items) % 2:
            raise ValueError("an item is set in what is no dictionary")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) not in (str, int):
                raise ValueError("a key that is neither a word nor a number")
            target[key] = value


def _found(name: str) -> Any:
    """Return the function or the class of storages that a pickle names."""
    module, _, word = name.partition(" ")
    if module == "torch" and word in DTYPES:
        return word
    if name not in FUNCTIONS:
        raise ValueError(f"it asks for {name.replace(' ', '.')}, which no state dict needs")
    return FUNCTIONS[name]


def _storage(found: Any) -> _Storage:
    kind, name, key, _, length = found
    if (
        kind != "storage"
        or type(name) is not str
        or name not in DTYPES
        or type(key) is not str
        or type(length) is not int
    ):
        raise ValueError("an unknown kind of storage")
    return _Storage(*DTYPES[name], key, length)


def is_pickled(file: Path) -> bool:
    return file.suffix in SUFFIXES


def read_pickled(file: Path) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """Read type, shape and place (the position of its first byte in the file) of every tensor, by name.

    Raises:
        ModelLoadError: the file is damaged, of torch's format before 1.6, or does more than to list tensors.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            return _read(file, archive)
    except zipfile.BadZipFile:
        problem = "is not a zip archive: damaged, or older than torch 1.6; save it again with torch or as safetensors"
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, struct.error, OverflowError) as error:
        problem = f"is not a plain list of tensors: {one_line(error)}"
    except (OSError, NotImplementedError, RuntimeError) as error:
        problem = f"cannot be read: {one_line(error)}"
    raise ModelLoadError(f"{file}: {problem}")


def _read(file: Path, archive: zipfile.ZipFile) -> dict[str, tuple[str, tuple[int, ...], int]]:
    members = {item.filename: item for item in archive.infolist()}
    (index,) = [name for name in members if name.endswith("/data.pkl") and name.count("/") == 1] or [""]
    if not index:
        raise ValueError("it has no data.pkl")
    folder = index.removesuffix("data.pkl")
    order = members.get(f"{folder}byteorder")
    if members[index].file_size > MAX_PICKLE or members[index].compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"data.pkl is compressed, or has more than {MAX_PICKLE} bytes")
    if order is not None and (order.file_size > 16 or archive.read(order) != b"little"):
        raise ValueError("its numbers are big-endian")
    found = _tensors(_Machine(archive.read(index)).run())
    size = file.stat().st_size
    starts: dict[str, int] = {}
    with file.open("rb") as stream:
        for tensor in found.values():
            name = f"{folder}data/{tensor.key}"
            if name not in starts:
                starts[name] = _start_of(stream, members[name], size)
    result = {}
    for name, tensor in found.items():
        member = members[f"{folder}data/{tensor.key}"]
        if (tensor.start + math.prod(tensor.shape)) * tensor.item_bytes > member.file_size:
            raise ValueError(f"{name} is larger than its storage")
        place = starts[member.filename] + tensor.start * tensor.item_bytes
        result[name] = tensor.dtype, tensor.shape, place
    return result


def _tensors(found: Any) -> Mapping[str, PickledTensor]:
    """Return the tensors of a state dict, which may be an item of a training framework's dictionary."""
    if not isinstance(found, dict):
        raise ValueError("it holds no dictionary")
    inside = next((found[key] for key in INSIDE if isinstance(found.get(key), dict)), found)
    tensors = {name: item for name, item in inside.items() if isinstance(item, PickledTensor) and isinstance(name, str)}
    if not tensors:
        raise ValueError("it holds no tensors")
    return tensors


def _start_of(stream: Any, member: zipfile.ZipInfo, size: int) -> int:
    """Return where the bytes of a member begin."""
    if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
        raise ValueError(f"{member.filename} is compressed or encrypted")
    stream.seek(member.header_offset)
    header = stream.read(LOCAL_HEADER)
    name_length, extra_length = struct.unpack("<HH", header[26:30])
    start = int(member.header_offset) + LOCAL_HEADER + int(name_length) + int(extra_length)
    if header[:4] != b"PK\x03\x04" or start + member.file_size > size:
        raise ValueError(f"{member.filename} is cut short")
    return start
