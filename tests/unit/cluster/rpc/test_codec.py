"""Values survive the wire, large arrays without copies, and what cannot be sent is named."""

import contextlib
import math
import tracemalloc
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from lockstep.cluster.rpc.codec import (
    INLINE_BYTES,
    CodecError,
    MethodSignature,
    decode_payload,
    encode_payload,
)
from lockstep.data.samples import Completion, Episode

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)
DTYPES = (
    hnp.boolean_dtypes()
    | hnp.integer_dtypes(endianness="?")
    | hnp.floating_dtypes(endianness="?")
    | hnp.complex_number_dtypes()
    | hnp.unicode_string_dtypes(max_len=3)
    | hnp.datetime64_dtypes()
)
ARRAYS = hnp.arrays(DTYPES, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))


def same(left: np.ndarray, right: np.ndarray) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


@given(PLAIN)
def test_plain_values_roundtrip(value: Any) -> None:
    assert decode_payload(encode_payload(value), Any) == value


@given(st.lists(ARRAYS, max_size=4), st.booleans())
def test_arrays_roundtrip_in_every_order_and_dtype(arrays: list[np.ndarray], fortran: bool) -> None:
    if fortran:
        arrays = [np.asfortranarray(array) if array.ndim > 1 else array for array in arrays]
    back = decode_payload(encode_payload({"a": arrays}), dict[str, list[np.ndarray]])["a"]
    assert all(same(a, b) for a, b in zip(arrays, back, strict=True))
    assert all(array.flags.writeable for array in back)


@given(
    st.lists(st.integers(0, 3 * INLINE_BYTES), min_size=1, max_size=5),
    st.sampled_from([np.uint8, np.int32, np.float64, np.dtype(">i2")]),
)
def test_arrays_of_every_size_mix(sizes: list[int], dtype: Any) -> None:
    arrays = [np.arange(size).astype(dtype) for size in sizes]
    back = decode_payload(bytearray(encode_payload(arrays)), list[np.ndarray])
    assert all(same(a, b) for a, b in zip(arrays, back, strict=True))
    assert all(array.flags.aligned and array.flags.writeable for array in back)


@given(st.binary(max_size=200))
def test_garbage_is_a_value_error(data: bytes) -> None:
    try:
        decode_payload(data, list[np.ndarray])
    except ValueError:
        pass
    except Exception as error:
        pytest.fail(f"{type(error)}: {error}")


@given(st.integers(0, 10_000), st.integers(0, 255))
def test_a_damaged_payload_never_crashes(position: int, value: int) -> None:
    payload = bytearray(encode_payload({"x": np.arange(5000), "y": [np.zeros(3), "text", Path("/a")]}))
    payload[position % len(payload)] = value
    with contextlib.suppress(ValueError, MemoryError):
        decode_payload(payload, Any)


def test_a_truncated_payload_is_refused() -> None:
    payload = bytes(encode_payload(np.arange(10_000)))
    for length in (0, 8, 15, 16, 40, 1000, len(payload) - 1):
        with pytest.raises(ValueError, match=r"cut|buffer|truncated"):
            decode_payload(payload[:length], np.ndarray)


@dataclass(slots=True)
class Leaf:
    tokens: np.ndarray
    finish: Literal["stop", "length"]
    where: Path | None = None
    extra: dict[str, Any] = field(default_factory=dict)


class Sum(BaseModel):
    kind: Literal["sum"] = "sum"
    scale: float = 1.0


class Clip(BaseModel):
    kind: Literal["clip"] = "clip"
    low: float
    folder: Path = Path("/")


Loss = Annotated[Sum | Clip, Field(discriminator="kind")]


class Service:
    def step(self, batch: list[Leaf], loss: Sum | Clip, more: Loss | None = None, n: int = 3) -> dict[str, np.ndarray]:
        raise NotImplementedError

    def one(self, model: Clip, path: Path, maybe: np.ndarray | None) -> tuple[int, ...]:
        raise NotImplementedError

    def untyped(self, x, y=2):  # type: ignore[no-untyped-def]
        raise NotImplementedError

    def nothing(self) -> None:
        raise NotImplementedError

    def stars(self, *args: int) -> None:
        raise NotImplementedError

    def impossible(self, x: Path | Leaf | int) -> None:
        raise NotImplementedError


def there(method: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    signature = MethodSignature(method)
    return signature.decode_arguments(signature.encode_arguments(args, kwargs))


def test_dataclasses_and_models_arrive_as_themselves() -> None:
    leaf = Leaf(np.arange(5, dtype=np.int32), "stop", Path("/x/y"), {"a": np.float32(0.5), "b": np.ones(2)})
    got = there(Service.step, [leaf], Clip(low=math.inf, folder=Path("/z")), more=Sum(scale=2))
    assert got["loss"] == Clip(low=math.inf, folder=Path("/z"))
    assert got["more"] == Sum(scale=2)
    assert "n" not in got, "defaults are the service's own"
    back = got["batch"][0]
    assert isinstance(back, Leaf)
    assert same(back.tokens, leaf.tokens)
    assert (back.finish, back.where, back.extra["a"]) == ("stop", Path("/x/y"), 0.5)
    assert same(back.extra["b"], np.ones(2))
    got = there(Service.one, Clip(low=1), Path("a"), None)
    assert got == {"model": Clip(low=1), "path": Path("a"), "maybe": None}
    assert there(Service.untyped, 1) == {"x": 1}


def test_completions_with_conversations_roundtrip() -> None:
    class Service:
        def collect(self) -> list[Completion]:
            raise NotImplementedError

    tokens, mask = np.arange(3, dtype=np.int32), np.array([True, False, True])
    episode = Episode([{"role": "tool", "content": "4"}], [0.5], "answer", {"calls": 1.0})
    sent = [
        Completion("a", tokens, np.zeros(3, np.float32), tokens, "stop", "x", mask, episode),
        Completion("b", tokens, np.zeros(3, np.float32), tokens, "stop", "x"),
    ]
    signature = MethodSignature(Service.collect)
    one, other = signature.decode_result(signature.encode_result(sent))
    assert same(one.mask, mask) and one.episode == episode
    assert other.mask is None and other.episode is None


def test_results_are_typed() -> None:
    signature = MethodSignature(Service.one)
    assert signature.decode_result(signature.encode_result((1, 2))) == (1, 2)
    with pytest.raises(CodecError, match=r"Service.one: return value\[1\]: Expected `int`, got `str`"):
        signature.decode_result(signature.encode_result((1, "x")))
    nothing = MethodSignature(Service.nothing)
    assert nothing.decode_result(nothing.encode_result(None)) is None
    with pytest.raises(CodecError, match="return value: Expected `null`"):
        nothing.decode_result(nothing.encode_result(3))


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        (([], object()), {}, "loss: builtins.object cannot be sent"),
        (([Leaf(np.array([object()]), "stop")], Sum()), {}, "batch: an array of object cannot be sent"),
        (([], Sum()), {"n": 2**70}, "n: "),
    ],
)
def test_unencodable_values_are_named(args: tuple, kwargs: dict, message: str) -> None:
    with pytest.raises(CodecError, match=f"Service.step: {message}"):
        MethodSignature(Service.step).encode_arguments(args, kwargs)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        (([{"tokens": 3, "finish": "stop"}], Sum()), {}, r"batch\[0\].tokens: Expected `numpy.ndarray`, got `int`"),
        (([], Sum()), {"n": "three"}, "n: Expected `int`, got `str`"),
        (([], {"kind": "sum", "scale": "wide"}), {}, "loss: "),
        (([], {"kind": "clap"}), {"more": None}, "loss: "),
    ],
)
def test_wrong_values_are_named_with_their_place(args: tuple, kwargs: dict, message: str) -> None:
    with pytest.raises(CodecError, match=f"Service.step: {message}"):
        there(Service.step, *args, **kwargs)


def test_wrong_arguments_fail_before_anything_is_sent() -> None:
    with pytest.raises(TypeError, match=r"Service.nothing: too many positional arguments"):
        MethodSignature(Service.nothing).encode_arguments((1,), {})
    with pytest.raises(TypeError, match=r"Service.one: missing a required argument: 'path'"):
        MethodSignature(Service.one).encode_arguments((Clip(low=1),), {})
    with pytest.raises(CodecError, match=r"stars: args"):
        MethodSignature(Service.stars)
    with pytest.raises(CodecError, match=r"Service.impossible: x: "):
        MethodSignature(Service.impossible)


def test_arguments_are_encoded_immediately() -> None:
    array = np.arange(INLINE_BYTES)
    payload = encode_payload(array)
    array[:] = -1
    assert same(decode_payload(payload, np.ndarray), np.arange(INLINE_BYTES))


def test_a_large_array_is_copied_once_to_encode_and_not_to_decode() -> None:
    array = np.ones(4_000_000, np.float64)
    tracemalloc.start()
    payload = encode_payload([array])
    _, peak = tracemalloc.get_traced_memory()
    assert peak < 1.05 * array.nbytes
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    (back,) = decode_payload(payload, list[np.ndarray])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak - before < 1_000_000
    assert np.shares_memory(back, np.frombuffer(payload, np.uint8))
    assert same(back, array)


def test_too_large_payloads_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.cluster.rpc.codec.MAX_PAYLOAD_BYTES", 1 << 20)
    with pytest.raises(CodecError, match=r"path: .* bytes are too many for one call"):
        MethodSignature(Service.one).encode_arguments((Clip(low=1), np.zeros(1 << 20), None), {})
    assert encode_payload(np.zeros(1 << 16))
