"""Inline PTX gives what its fallback gives, on every half and on many pairs of words."""

import pytest
import torch
from ptx import PROBES, options, same, text, words

from pyg_ioaware.engines.cuda import sources

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("name", PROBES)
def test_ptx_is_as_its_fallback(name):
    import cupy
    from cupy.cuda import compiler, function

    major, minor = torch.cuda.get_device_capability()
    if 10 * major + minor < PROBES[name].oldest:
        pytest.skip("the kernels use the fallback here")
    a, b = (t.cuda() for t in words())
    outs = []
    for portable in (False, True):
        given = (*options(name, portable), f"-I{sources.folder()}")
        # RawModule would flush subnormal numbers to zero, which only the fallback heeds.
        binary, _ = compiler.compile_using_nvrtc(text(name), given)
        module = function.Module()
        module.load(binary)
        out = torch.zeros_like(a)
        args = (a.data_ptr(), b.data_ptr(), out.data_ptr(), cupy.int32(a.numel()))
        module.get_function("probe")((-(-a.numel() // 256),), (256,), args)
        torch.cuda.synchronize()
        outs.append(out)
    assert outs[0].any()
    assert same(name, *outs)
