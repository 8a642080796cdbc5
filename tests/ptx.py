"""The functions of the kernels that have inline PTX: how each is called by itself.

tests/gpu/test_ptx.py compares each with its fallback on a GPU.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Probe(NamedTuple):
    """A call on the words a and b, the macros, the dtype in which results are compared, and the
    oldest architecture that has the instruction."""

    header: str
    call: str
    macros: dict[str, int]
    result: torch.dtype
    oldest: int = 75


FLOAT, HALF, BFLOAT = {"SCALAR": 0}, {"SCALAR": 2}, {"SCALAR": 3}
PAIRS = {"VEC": 2, "WEIGHTED": 0, "PAIRED": 1}

# By the name of the function, and what follows a dot where it has several forms.
PROBES = {
    "half_to_float": Probe("scalar", "__float_as_uint(half_to_float(a))", HALF, torch.float32),
    "half_of": Probe("scalar", "half_of(__uint_as_float(a))", HALF, torch.int32),
    "bfloat16_of": Probe("scalar", "bfloat16_of(__uint_as_float(a))", BFLOAT, torch.int32),
    "rounded_product": Probe(
        "scalar",
        "__double2hiint(rounded_product(word_double(a, b), word_double(b, a)))",
        {"SCALAR": 1},
        torch.int32,
    ),
    "hidden": Probe("vec", "hidden(a)", {**FLOAT, "VEC": 1}, torch.int32),
    "unpack_anew": Probe("vec", "unpacked_anew(a)", {**HALF, "VEC": 2}, torch.int32),
    **{
        f"best_of.{minimum}": Probe(
            "best",
            "__float_as_uint(best_of(__uint_as_float(a), __uint_as_float(b)))",
            {**FLOAT, "VEC": 1, "WEIGHTED": 0, "MINIMUM": minimum},
            torch.float32,
        )
        for minimum in (0, 1)
    },
    **{
        f"{name}.{scalar['SCALAR']}.{minimum}": Probe(
            "pairs" if name == "equal_pair" else "best",
            f"{name}(a, b)",
            {**scalar, **PAIRS, "MINIMUM": minimum},
            dtype if name == "best_pair" else torch.int32,
            oldest,
        )
        for name in ("better_pair", "equal_pair", "best_pair")
        for scalar, dtype, oldest in ((HALF, torch.float16, 80), (BFLOAT, torch.bfloat16, 90))
        for minimum in (0, 1)
    },
}

_TEXT = """
#include "common/{header}.cuh"

DEVICE double word_double(unsigned high, unsigned low) {{
  return __longlong_as_double((unsigned long long)high << 32 | low);
}}
{more}
extern "C" __global__ void probe(const unsigned* as, const unsigned* bs, unsigned* out, int n) {{
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const unsigned a = as[i], b = bs[i];
  out[i] = {call};
}}
"""
_UNPACKED = """
DEVICE unsigned unpacked_anew(unsigned a) {
  Packed packed = {a};
  unpack_anew(packed);
  return packed.bits;
}
"""


def text(name: str) -> str:
    """Returns a kernel that calls a function."""
    probe = PROBES[name]
    more = _UNPACKED if probe.header == "vec" else ""
    return _TEXT.format(header=probe.header, call=probe.call, more=more)


def options(name: str, portable: bool) -> tuple[str, ...]:
    """Returns the options it is compiled with."""
    macros = {"INDEX": 32, **PROBES[name].macros} | ({"PORTABLE": 1} if portable else {})
    return ("-std=c++17", *(f"-D{macro}={value}" for macro, value in macros.items()))


def words() -> tuple[Tensor, Tensor]:
    """Returns pairs of words: every half in a, as a number and in pairs, against many in b."""
    generator = torch.Generator().manual_seed(0)
    every = torch.arange(2**16)
    odd = torch.tensor(
        [0, 0x8000, 1, 0x8001, 0x3C00, 0x7BFF, 0x7C00, 0xFC00, 0x7E00, 0x7F80, 0xFF80, 0x7FC0]
    )
    low = torch.cat([odd, torch.tensor([0x0FFF, 0x1000, 0x1001, 0x7FFF, 0xFFFF])])
    other = torch.cat([odd, torch.randint(2**16, (20,), generator=generator)])
    pairs = [
        (every.repeat(len(low)), low.repeat_interleave(len(every))),  # halves as they are
        (
            (every << 16).repeat(len(low)) | low.repeat_interleave(len(every)),
            torch.randint(2**32, (len(every) * len(low),), generator=generator),
        ),
        (
            every.repeat(len(other)) * 0x10001,
            other.repeat_interleave(len(every)) * 0x10001,
        ),
    ]
    a, b = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    return a.to(torch.int32), b.to(torch.int32)


def same(name: str, found: Tensor, wanted: Tensor) -> bool:
    """Tells whether the results of two forms are equal, or NaN both."""
    dtype = PROBES[name].result
    found, wanted = found.view(dtype), wanted.view(dtype)
    return bool(((found == wanted) | (found != found) & (wanted != wanted)).all())
