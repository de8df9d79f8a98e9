"""A native library that cannot be used is none, and the user is told why."""

import base64
import hashlib
import re
from collections.abc import Iterator
from ctypes import c_double, c_float, c_int32, c_int64, c_void_p
from pathlib import Path

import pytest

import penstock.kernels.cpu
from penstock.config import EngineConfig
from penstock.errors import InvalidRequestError
from penstock.kernels.cpu import library
from penstock.kernels.cpu.library import ABI, Abi
from penstock.models.config_json import load_model_config
from penstock.weights.hub import resolve_model
from tests.kernels.packed import levels


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The library is looked for again, and again after the test; no other build of it is asked for."""
    monkeypatch.delenv(library.LIBRARY_VARIABLE, raising=False)
    library._find_library.cache_clear()
    yield
    library._find_library.cache_clear()


def refusal() -> str:
    """What a user reads who asks for the native kernels."""
    with pytest.raises(InvalidRequestError) as caught:
        EngineConfig.from_options(kernels="cpu").resolve(load_model_config(resolve_model("demo")))
    return str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"no library\n"])
def test_a_damaged_library_is_none(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: None
) -> None:
    """Guards against a traceback of `penstock --version` where a build was cut short."""
    (tmp_path / "penstock_cpu.so").write_bytes(content)
    monkeypatch.setattr(penstock.kernels.cpu, "__path__", [str(tmp_path)])
    assert library.load_library() is None
    assert "cannot be used" in refusal()
    assert "\n" not in refusal()


@pytest.mark.skipif(not levels(), reason="no native library")
@pytest.mark.covers("F34")
def test_a_library_that_was_cut_short_or_replaced_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: None
) -> None:
    """Guards against a process that dies of SIGBUS without a message, at the first page that a file of too few bytes
    does not have, and against a file that is another one than pip has installed. The engine computes without it, and
    one line says why."""
    whole = Path(library._find_library()[0]._name).read_bytes()
    site = tmp_path / "site-packages"
    folder, record = site / "penstock/kernels/cpu", site / "penstock-0.1.0.dist-info/RECORD"
    for made in (folder, record.parent):
        made.mkdir(parents=True)
    monkeypatch.setattr(penstock.kernels.cpu, "__path__", [str(folder)])
    digest = base64.urlsafe_b64encode(hashlib.sha256(whole).digest()).decode().rstrip("=")
    other = bytearray(whole)
    other[len(other) // 2] ^= 1
    name = "penstock/kernels/cpu/penstock_cpu.so"

    def found(content: bytes) -> str:
        (folder / "new.so").write_bytes(content)
        (folder / "new.so").replace(folder / "penstock_cpu.so")  # a file that is mapped must not be written over
        library._find_library.cache_clear()
        config = EngineConfig.from_options().resolve(load_model_config(resolve_model("demo")))
        assert config.numerics.kernels == ("cpu" if library.load_library() else "reference")
        return config.reasons["kernels"]

    for share in (0.3, 0.7):
        cut = whole[: int(share * len(whole))]
        assert re.search(rf"reference: .* has {len(cut)} of \d+ bytes\); install the package again", found(cut))
    assert "damaged" not in found(whole)
    record.write_text(f"penstock/cli/main.py,sha256=x,1\n{name},sha256={digest},{len(whole)}\n")
    assert "damaged" not in found(whole)
    assert "its SHA-256 differs" in found(bytes(other))
    assert f"has {len(whole) + 1} bytes, and {len(whole)} were installed" in found(whole + b"x")


@pytest.mark.skipif(not levels(), reason="no native library")
def test_a_library_of_another_version_is_told_as_such(monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    """Guards against an old build that misreads what it is given, and advice to install a compiler where it is."""
    monkeypatch.setattr(library, "ABI_VERSION", 99)
    assert library.load_library() is None
    assert "abi.h; install the package again" in refusal()
    assert "compiler" not in refusal()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("std::int32_t forgotten(float x);", "cannot parse 'std::int32_t forgotten"),
        ("PENSTOCK_API std::int32_t f(unsigned x);", "unknown type 'unsigned'"),
        ("PENSTOCK_API std::int32_t f(float** x);", "cannot parse 'float"),
        ("struct S { std::uint8_t small; };", "unknown type 'std::uint8_t'"),
        ("struct S { float x : 3; };", "cannot parse"),
    ],
)
def test_a_declaration_that_is_not_understood_is_an_error(text: str, problem: str) -> None:
    """Guards against a function or field of abi.h that Python leaves out or reads as another type."""
    with pytest.raises(ValueError, match=re.escape(problem)):
        Abi(text)


def test_a_header_becomes_ctypes() -> None:
    """Guards against a pointer, an array, an enum member or a second name of a line that is read as something else."""
    abi = Abi(
        """
        #include <cstdint>
        namespace penstock {
        constexpr int MANY = 3;  // { not a struct };
        enum Kind : std::int32_t { FIRST = 4, NEGATIVE = -1 };
        enum Place : std::int64_t { ZERO, ONE };
        }  // namespace penstock
        struct Pair {
            const float* x;
            std::int64_t a, b[penstock::MANY];
        };
        PENSTOCK_API double total(
            penstock::Context* context, const Pair* pair, float scale);
        PENSTOCK_API void nothing();
        """
    )
    assert abi.constants == {"MANY": 3, "FIRST": 4, "NEGATIVE": -1, "ZERO": 0, "ONE": 1}
    assert abi.enums["Place"] == {"ZERO": 0, "ONE": 1}
    assert abi.structs["Pair"] == [("x", c_void_p), ("a", c_int64), ("b", c_int64 * 3)]
    assert abi.functions == {"total": (c_double, [c_void_p, c_void_p, c_float]), "nothing": (None, [])}


def test_a_recorded_call_has_room_for_all_arguments() -> None:
    """Guards against a recordable function that abi.h does not declare, or whose arguments do not fit."""
    for name in library.RECORDABLE:
        result, arguments = ABI.functions[name]
        assert result is c_int32
        assert len(arguments) - 1 <= library.MAX_ARGUMENTS


def test_no_library_is_told_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    """Guards against a refusal that does not say what is missing."""
    monkeypatch.setattr(penstock.kernels.cpu, "__path__", [str(tmp_path)])
    assert library.load_library() is None
    assert "not installed, because there was no C++ compiler" in refusal()
