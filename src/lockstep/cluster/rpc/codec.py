"""Encodes arguments and results of calls: as msgpack, typed by the method's annotations, with arrays as raw bytes.

A payload is `body length | data start | body | padding | arrays`. Arrays of at least `INLINE_BYTES` bytes follow the
body, aligned: encoding copies them once, and decoding does not copy them. A decoded large array is a writable view of
the received frame (and keeps the frame alive). Decoding cannot execute code, since pickle is not used.

Types: None, bool, int (64 bit), float, str, bytes, list, tuple, dict, set, Literal, enums, dataclasses, datetimes,
`numpy.ndarray`, `Path`, pydantic models, and unions as msgspec knows them (plus unions of pydantic models). Under
`Any`, tuples come back as lists and paths as strings.
"""

import inspect
import math
import struct
import threading
import types
import typing
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path, PurePath
from typing import Any, TypeVar

import msgspec
import numpy as np

from lockstep.base.errors import PicklableError
from lockstep.base.transport.frames import MAX_FRAME
from lockstep.cluster.protocol import DeferredResult

INLINE_BYTES = 16 << 10
"""Smaller arrays are stored inside the body and copied out of it."""

MAX_PAYLOAD_BYTES = MAX_FRAME - (1 << 20)
"""Largest payload, in bytes."""

MAX_KEPT, MAX_KEPT_BYTES = 256, 1 << 10
"""How many encodings of arguments are kept for each method, and how large each of them is at most."""

_ALIGN = 64
_PREFIX = struct.Struct("<QQ")
_ARRAY = struct.Struct("<BBB")
_SIZE = struct.Struct("<Q")
_ARRAY_CODE = 1
_OWN_BYTES_CODE = 2
OWN_BYTES = object()
"""Stands for the bytes that follow a head, see `MethodSignature.encode_head`: uint8 `[bytes]` once decoded."""
_IMMUTABLE_TYPES = {str, int, bool, float, type(None)}
"""Argument types whose values cannot change."""

Payload = bytes | memoryview
T = TypeVar("T")


class CodecError(PicklableError, TypeError):
    """A value cannot be sent, or does not match the method's annotation. Names method, argument and problem."""

    def __init__(self, method: str, argument: str, problem: str) -> None:
        super().__init__(f"{method}: {argument}: {problem}")
        self.method, self.argument, self.problem = method, argument, problem


class MethodSignature:
    """The parameters and result of a service method, and how they are encoded."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self.name: str = method.__name__
        self.qualified: str = method.__qualname__
        self.concurrent = bool(getattr(method, "__lockstep_concurrent__", False))
        signature = inspect.signature(method)
        self._parameters = list(signature.parameters.values())[1:]
        self._signature = signature.replace(parameters=self._parameters)
        positional = all(parameter.kind is not parameter.KEYWORD_ONLY for parameter in self._parameters)
        self._names = tuple(parameter.name for parameter in self._parameters) if positional else ()
        self._required = sum(parameter.default is parameter.empty for parameter in self._parameters)
        self._encodings: dict[tuple[Any, ...], Payload] = {}
        """Encodings of immutable arguments, by the arguments and their types (since 1 == True)."""
        for parameter in self._parameters:
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise CodecError(self.qualified, parameter.name, "a remote method needs named parameters, no * or **")
        hints = _type_hints(method)
        self._parameter_types = {
            p.name: _WireType(self.qualified, p.name, hints.get(p.name, Any)) for p in self._parameters
        }
        self._result = _WireType(self.qualified, "return value", _result_type(hints.get("return", Any)))
        self._returns_nothing = self._result.wire_type is type(None)
        self._struct = msgspec.defstruct(
            "Arguments",
            [(name, kind.wire_type, msgspec.UNSET) for name, kind in self._parameter_types.items()],
            rename={name: name for name in self._parameter_types},
            kw_only=True,
            forbid_unknown_fields=True,
        )

    def encode_arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Payload:
        """Encodes the arguments of a call. Reuses the encodings of equal immutable arguments, since thousands of
        workers may get the same, or one of a few.

        Raises TypeError for arguments that the method does not accept, CodecError for values that cannot be sent."""
        types = tuple(map(type, args))
        is_immutable = not kwargs and _IMMUTABLE_TYPES.issuperset(types)
        if is_immutable and (known := self._encodings.get((*args, *types))) is not None:
            return known
        arguments = self._bind(args, kwargs)
        try:
            payload = encode_payload(arguments)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise CodecError(self.qualified, *_find_unencodable(arguments, error)) from None
        if is_immutable and len(payload) <= MAX_KEPT_BYTES:
            if len(self._encodings) >= MAX_KEPT:
                self._encodings.clear()
            self._encodings[(*args, *types)] = payload
        return payload

    def encode_head(self, args: tuple[Any, ...]) -> bytes:
        """Encodes arguments of many calls that differ only in the bytes for which `OWN_BYTES` stands: those follow the
        head. Raises what `encode_arguments` raises."""
        payload = bytes(self.encode_arguments(args, {}))
        _, start = _PREFIX.unpack_from(payload)
        if len(payload) > start:
            raise CodecError(self.qualified, "arguments", "large arrays and the bytes of a worker cannot be combined")
        return payload.ljust(start, b"\0")

    def _bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the arguments by name."""
        if not kwargs and self._required <= len(args) <= len(self._names):
            return dict(zip(self._names, args, strict=False))
        try:
            return self._signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{self.qualified}: {error}") from None

    def decode_arguments(self, payload: Payload | bytearray) -> dict[str, Any]:
        """Decodes the given arguments. Returns them by name."""
        values = self._decode(payload, self._struct)
        arguments = ((name, getattr(values, name)) for name in self._parameter_types)
        return {
            name: self._parameter_types[name].convert(value) for name, value in arguments if value is not msgspec.UNSET
        }

    def encode_result(self, value: Any) -> Payload:
        try:
            return encode_payload(value)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise CodecError(self.qualified, "return value", str(error)) from None

    def decode_result(self, payload: Payload | bytearray) -> Any:
        if self._returns_nothing and payload == _NOTHING:  # as most calls of thousands of workers
            return None
        value = self._decode(payload, self._result.wire_type)
        return value if self._result.convert is _identity else self._result.convert(value)

    def _decode(self, payload: Payload | bytearray, kind: Any) -> Any:
        try:
            return decode_payload(payload, kind)
        except (msgspec.DecodeError, ValueError, TypeError) as error:
            problem, _, path = str(error).partition(" - at `$")
            path = path.rstrip("`").lstrip(".")
            whole = "arguments" if kind is self._struct else "return value"
            inside = path if kind is self._struct else f"return value{path}"
            raise CodecError(self.qualified, inside if path else whole, problem) from None


class _WireType:
    """The type that msgspec decodes for an annotation, and the conversion of the decoded value to the annotation."""

    def __init__(self, method: str, argument: str, annotation: Any) -> None:
        self.wire_type = annotation
        self.convert: Callable[[Any], Any] = _identity
        self._where = method, argument
        try:
            msgspec.msgpack.Decoder(annotation, dec_hook=_dec_hook)
        except TypeError as error:
            if not _contains_models(annotation):
                raise CodecError(method, argument, str(error)) from None
            from pydantic import TypeAdapter
            from pydantic.errors import PydanticUserError

            self.wire_type = Any
            try:
                self._adapter: TypeAdapter[Any] = TypeAdapter(annotation)
            except PydanticUserError:
                raise CodecError(method, argument, str(error)) from None
            self.convert = self._validate

    def _validate(self, value: Any) -> Any:
        try:
            return self._adapter.validate_python(value)
        except ValueError as error:
            raise CodecError(*self._where, str(error)) from None


def encode_payload(value: Any) -> Payload:
    """Encodes a value. Later changes to its arrays do not affect the payload.

    Raises:
        TypeError, ValueError, OverflowError: the value contains something that cannot be sent.
    """
    try:
        body = _encoder.encode(value)
    finally:
        arrays, _encode_context.arrays = _encode_context.arrays, None  # or it would keep arrays alive
    start = -(-(_PREFIX.size + len(body)) // _ALIGN) * _ALIGN
    size = start if arrays is None else start + arrays.size
    if size > MAX_PAYLOAD_BYTES:
        raise ValueError(f"{size} bytes are too many for one call (at most {MAX_PAYLOAD_BYTES}): send it in parts")
    prefix = _PREFIX.pack(len(body), start)
    if arrays is None or not arrays.kept:
        return prefix + body
    buffer = np.empty(size, np.uint8)
    view = buffer.data
    view[: _PREFIX.size + len(body)] = prefix + body
    for offset, array in arrays.kept:
        target = np.frombuffer(view, array.dtype, array.size, start + offset)
        np.copyto(target.reshape(array.shape), array)
    return view


def decode_payload(payload: Payload | bytearray, kind: Any) -> Any:
    """Decodes a value of type `kind`. Large arrays are views of `payload`.

    Raises:
        msgspec.ValidationError: the value is not a `kind`; says which part.
        ValueError: the payload is truncated or inconsistent.
    """
    view = memoryview(payload)
    if view.format != "B":
        view = view.cast("B")
    if len(view) < _PREFIX.size:
        raise ValueError("the payload is truncated")
    length, start = _PREFIX.unpack_from(view)
    end = _PREFIX.size + length
    if end > len(view):
        raise ValueError("the payload is truncated")

    _decode_context.payload, _decode_context.start = view, start
    try:
        return _decoder(kind).decode(view[_PREFIX.size : end])
    finally:
        _decode_context.payload = None


_decode_context = threading.local()
"""The payload that a thread is decoding, and the offset of its arrays."""


@cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind, dec_hook=_dec_hook, ext_hook=_read_extension)


def _read_extension(code: int, data: memoryview) -> Any:
    if code == _OWN_BYTES_CODE:
        return np.frombuffer(_decode_context.payload, np.uint8)[_decode_context.start :]
    if code != _ARRAY_CODE:
        raise ValueError(f"unknown extension {code}")
    return _read_array(data, _decode_context.payload, _decode_context.start)


class _EncodeContext(threading.local):
    """The arrays of the payload that a thread is encoding; None if none has been encoded."""

    arrays: "_ArrayCollector | None" = None


class _ArrayCollector:
    """Collects, while the body is encoded, the arrays that will follow it."""

    __slots__ = ("_code", "_last", "kept", "size")

    def __init__(self) -> None:
        self.kept: list[tuple[int, np.ndarray]] = []
        self.size = 0
        self._last: np.ndarray | None = None
        """The last array, since all requests of a group have the same prompt; and its code."""
        self._code: msgspec.msgpack.Ext | None = None

    def add(self, value: np.ndarray) -> msgspec.msgpack.Ext:
        """What stands for an array in the body."""
        if value is not self._last or self._code is None:
            self._last, self._code = value, self._array(value)
        return self._code

    def _array(self, array: np.ndarray) -> msgspec.msgpack.Ext:
        size = array.nbytes
        head = _array_header(array.dtype, array.ndim, size < INLINE_BYTES)
        shape = _SIZE.pack(array.size) if array.ndim == 1 else struct.pack(f"<{array.ndim}Q", *array.shape)
        if size < INLINE_BYTES:
            return msgspec.msgpack.Ext(_ARRAY_CODE, b"".join((head, shape, array.tobytes())))
        offset, self.size = self.size, _align(self.size + size)
        self.kept.append((offset, array))
        return msgspec.msgpack.Ext(_ARRAY_CODE, b"".join((head, shape, _SIZE.pack(offset))))


_encode_context = _EncodeContext()


def _encode_other(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        arrays = _encode_context.arrays
        if arrays is None:
            arrays = _encode_context.arrays = _ArrayCollector()
        return arrays.add(value)
    if value is OWN_BYTES:
        return msgspec.msgpack.Ext(_OWN_BYTES_CODE, b"")
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, PurePath):
        return str(value)
    if hasattr(type(value), "model_validate"):
        return value.model_dump()
    if isinstance(value, types.MappingProxyType):
        return dict(value)
    raise TypeError(f"{type(value).__module__}.{type(value).__qualname__} cannot be sent between processes")


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_other)


@cache
def _array_header(dtype: np.dtype[Any], ndim: int, inline: bool) -> bytes:
    if dtype.hasobject or dtype.names is not None:
        raise TypeError(f"an array of {dtype} cannot be sent: only plain numbers, strings and dates")
    kind = dtype.str.encode()
    return _ARRAY.pack(inline, len(kind), ndim) + kind


@cache
def _dtype_of(kind: bytes) -> np.dtype[Any]:
    return np.dtype(kind.decode("ascii"))


def _read_array(data: memoryview, payload: memoryview, start: int) -> np.ndarray:
    try:
        inline, name, ndim = _ARRAY.unpack_from(data)
        dtype = _dtype_of(bytes(data[_ARRAY.size : _ARRAY.size + name]))
        at = _ARRAY.size + name
        shape = _SIZE.unpack_from(data, at) if ndim == 1 else struct.unpack_from(f"<{ndim}Q", data, at)
        at += 8 * ndim
        count = math.prod(shape)
        if count * dtype.itemsize == 0:
            return np.empty(shape, dtype)
        if inline:
            flat = np.frombuffer(data, dtype, count, at).copy()
        else:
            (offset,) = _SIZE.unpack_from(data, at)
            flat = np.frombuffer(payload, dtype, count, start + offset)
        return flat if ndim == 1 else flat.reshape(shape)
    except (OverflowError, struct.error, TypeError) as error:
        raise ValueError(f"an array cannot be decoded: {error}") from None


def _dec_hook(kind: Any, value: Any) -> Any:
    if kind is np.ndarray:
        return value
    origin = typing.get_origin(kind) or kind
    if origin is np.ndarray:
        return value
    if isinstance(origin, type) and issubclass(origin, PurePath):
        return Path(value) if issubclass(origin, Path) else origin(value)
    if hasattr(origin, "model_validate"):
        return origin.model_validate(value)
    raise TypeError(f"{kind} cannot be sent between processes")


def _find_unencodable(arguments: Mapping[str, Any], error: Exception) -> tuple[str, str]:
    """Returns the name of the first argument that cannot be encoded, and why."""
    for name, value in arguments.items():
        try:
            encode_payload(value)
        except (TypeError, ValueError, OverflowError, RecursionError) as reason:
            return name, str(reason)
    return "arguments", str(error)


def _type_hints(method: Callable[..., Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(method, include_extras=True)
    return {name: type(None) if hint is None else hint for name, hint in hints.items()}


def _result_type(annotation: Any) -> Any:
    """The type that the caller of a method gets: T for a `DeferredResult[T]`."""
    return typing.get_args(annotation)[0] if typing.get_origin(annotation) is DeferredResult else annotation


def _contains_models(annotation: Any) -> bool:
    """Whether the annotation consists of pydantic models and builtins, so that pydantic can validate it."""
    if typing.get_origin(annotation) is typing.Annotated:
        return _contains_models(typing.get_args(annotation)[0])
    arguments = typing.get_args(annotation)
    if arguments:
        return any(_contains_models(argument) for argument in arguments)
    return isinstance(annotation, type) and hasattr(annotation, "model_validate")


def _align(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _identity(value: Any) -> Any:
    return value


_NOTHING = encode_payload(None)


@cache
def signature_of(method: Callable[..., Any]) -> MethodSignature:
    """The method's signature, cached."""
    return MethodSignature(method)
