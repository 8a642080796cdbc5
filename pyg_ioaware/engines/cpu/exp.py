"""The exponential function of a Vec, to within two units in the last place for x <= 0.

x = n ln 2 + r with |r| <= ln 2 / 2; exp(r) is a Taylor polynomial, and 2^n an exponent field.
Results below the smallest normal number are 0; NaN stays NaN.
"""

# mypy: ignore-errors
from pyg_ioaware.engines.cpu.jit import device
from pyg_ioaware.engines.cpu.vec import (
    better,
    fma,
    lanes,
    mul,
    nbytes,
    nearest,
    power_of_two,
    select,
    splat,
)

LOG2_E = 1.4426950408889634


@device
def _horner(p, r, coefficient):
    return fma(p, r, splat(r, coefficient))


@device
def _reduced(x, n, high, low):
    """Returns x - n (high + low); n * high is exact."""
    return fma(n, splat(x, -low), fma(n, splat(x, -high), x))


@device
def exp(x):
    """Returns e to the power of each lane, none of which is above 0."""
    if nbytes(x) == 4 * lanes(x):
        lowest = splat(x, -87.33654)
        n = nearest(mul(select(better(x, lowest, None), x, lowest), splat(x, LOG2_E)))
        r = _reduced(x, n, 0.693359375, -2.12194440e-4)
        p = splat(x, 1 / 5040)
    else:
        lowest = splat(x, -708.396418532264)
        n = nearest(mul(select(better(x, lowest, None), x, lowest), splat(x, LOG2_E)))
        r = _reduced(x, n, 6.93145751953125e-1, 1.42860682030941723212e-6)
        p = splat(x, 1 / 6227020800)
        p = _horner(p, r, 1 / 479001600)
        p = _horner(p, r, 1 / 39916800)
        p = _horner(p, r, 1 / 3628800)
        p = _horner(p, r, 1 / 362880)
        p = _horner(p, r, 1 / 40320)
        p = _horner(p, r, 1 / 5040)
    p = _horner(p, r, 1 / 720)
    p = _horner(p, r, 1 / 120)
    p = _horner(p, r, 1 / 24)
    p = _horner(p, r, 1 / 6)
    p = _horner(p, r, 1 / 2)
    p = _horner(p, r, 1.0)
    p = _horner(p, r, 1.0)
    result = mul(p, power_of_two(n))
    return select(better(lowest, x, None), splat(x, 0.0), result)
