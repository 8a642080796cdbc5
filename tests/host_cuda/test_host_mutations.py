"""Faults planted in the kernels themselves: the comparison with plain PyTorch sees each of them."""

import faulthandler
import os
import shutil
import signal
import traceback
from pathlib import Path
from typing import NamedTuple

import pytest
import test_host_attention
import test_host_ops
import torch
from runtime import COMPILER, HostError, HostRuntime, installed
from structures import HOSTILE, check_graph
from test_host_ops import GRAPHS

from pyg_ioaware.engines.cuda import CUDAEngine, sources
from pyg_ioaware.graph.csr import Adjacency

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="needs g++"),
    pytest.mark.usefixtures("poison", "one_thread"),
]

SEEDS = range(4)
SEEN = 3  # how a child ends in which a comparison failed


class Fault(NamedTuple):
    """A text of a file, what takes its place, and the case that sees it with which rows."""

    file: str
    right: str
    wrong: str
    case: str
    channels: int = 3
    split: int = 3


FAULTS = {
    "missing_barrier_of_a_merge": Fault(
        "common/merge.cuh",
        "shared[threadIdx.x] = sum;\n      }\n      __syncthreads();",
        "shared[threadIdx.x] = sum;\n      }",
        "sum",
    ),
    "missing_barrier_between_features": Fault(
        "common/merge.cuh",
        "f);\n      }\n      __syncthreads();",
        "f);\n      }",
        "sum",
        channels=35,
    ),
    "missing_barrier_of_parameters": Fault(
        "common/slots.cuh", "      __syncthreads();\n      if", "      if", "gatv2"
    ),
    "missing_barrier_of_edge_features": Fault(
        "gatv2_edges.cu", "mine;\n    }\n    __syncthreads();", "mine;\n    }", "gatv2_edges"
    ),
    "row_that_nobody_writes": Fault(
        "common/rows.cuh", "it.begin <= split", "it.begin < split", "sum"
    ),
    "partial_that_is_left_out": Fault(
        "common/merge.cuh", "p < parts; p++", "p < parts - 1; p++", "sum"
    ),
    "tail_that_is_too_long": Fault(
        "sddmm.cu", "SPREAD || k + u >= count", "SPREAD || k + u > count", "sddmm"
    ),
    "edge_after_the_last": Fault(
        "common/edges.cuh", "found = at < end ?", "found = at <= end ?", "transformer"
    ),
    "batch_that_is_not_written": Fault(
        "common/attend_target.cuh", "put(own, writes, s, to[s]);", "", "transformer", split=20
    ),
    "delta_of_whole_rows_alone": Fault(
        "common/attend_target.cuh", "edges.part < 0) return", "true) return", "transformer"
    ),
    "signs_that_nobody_reads": Fault(
        "common/signed_sums.cuh", "word >> v & 1) sum", "1) sum", "gatv2"
    ),
    "bytes_of_another_lane": Fault("common/signed_sums.cuh", "? 0x3715", "? 0x3751", "gatv2_words"),
    "signs_of_another_lane": Fault("common/signed_sums.cuh", "first & 4", "0", "gatv2_words"),
    "signs_of_another_edge": Fault(
        "common/signs.cuh", "? 0x3726 : 0x5140", "? 0x5140 : 0x3726", "gatv2_words"
    ),
    "signs_that_are_shifted_alike": Fault(
        "common/signs.cuh", "kept << 4 * own | got << 4 * other", "kept | got << 4", "gatv2_words"
    ),
    "mask_without_the_last_lane": Fault(
        "common/combine.cuh", "ALL_LANES 0xffffffffu", "ALL_LANES 0x7fffffffu", "transformer"
    ),
    "mask_of_another_group": Fault(
        "common/rows.cuh", "threadIdx.x / LANES * LANES & 31", "threadIdx.x / LANES & 31", "sddmm"
    ),
    "lanes_of_another_head": Fault(
        "common/heads.cuh", "u / OWN * SPREAD, HEAD_LANES)", "u / OWN * SPREAD, 32)", "gatv2"
    ),
    "order_of_ties": Fault(
        "reduce.cu", "min(place[v], other.place[v])", "max(place[v], other.place[v])", "min_first"
    ),
    "dropout_of_another_head": Fault(
        "common/philox.cuh", "c2 = head / 4", "c2 = head / 8", "transformer_weights"
    ),
    "tile_that_goes_on_into_the_next_row": Fault(
        "structure.cu",
        "min(start + part * size + size, stop)",
        "start + part * size + size",
        "structure",
    ),
    "missing_barrier_between_sums_of_tiles": Fault(
        "structure.cu",
        "  __syncthreads();  // the sums of the call before were read\n",
        "",
        "structure",
    ),
    "order_that_is_not_checked_across_threads": Fault(
        "structure.cu", "e > 0 && __ldg(dst + e - 1) > to", "e % 32 && dst[e - 1] > to", "structure"
    ),
}


def planted(folder: Path, fault: Fault) -> Path:
    """Copies the kernels, with a fault."""
    kernels = folder / "kernels"
    shutil.copytree(sources.folder(), kernels)
    path = kernels / fault.file
    text = path.read_text()
    assert text.count(fault.right) == 1, f"{fault.file} has it {text.count(fault.right)} times"
    path.write_text(text.replace(fault.right, fault.wrong))
    return kernels


def compare(kernels: Path, fault: Fault, seed: int) -> None:
    """Compares the case of a fault with plain PyTorch."""
    if fault.case == "structure":
        with installed(CUDAEngine(HostRuntime(seed, kernels=kernels)), split=fault.split) as engine:
            for name in ("hubs_in_many_blocks", "one_step_back"):
                check_graph(engine, HOSTILE[name])
        return
    (src, dst), num_src, num_dst = GRAPHS["hubs"]
    with installed(CUDAEngine(HostRuntime(seed, kernels=kernels)), split=fault.split):
        adj = Adjacency.from_pair(src, dst, num_src, num_dst)
        assert adj is not None
        if fault.case in test_host_attention.CASES:
            test_host_attention.CASES[fault.case].check(adj)
        else:
            test_host_ops.CASES[fault.case].check(adj, 2, fault.channels, torch.float32)


def seen(kernels: Path, fault: Fault, seeds: range) -> bool:
    """Tells whether its case fails, in a child: a wrong kernel may use memory that is not its."""
    child = os.fork()
    if not child:
        faulthandler.disable()
        try:
            for seed in seeds:
                compare(kernels, fault, seed)
            os._exit(0)
        except (AssertionError, HostError):
            os._exit(SEEN)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, SEEN, -signal.SIGSEGV, -signal.SIGABRT), f"the child ended with {code}"
    return code != 0


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_a_kernel_is_seen(tmp_path: Path, name: str) -> None:
    fault = FAULTS[name]
    assert not seen(sources.folder(), fault, SEEDS[:1])
    assert seen(planted(tmp_path, fault), fault, SEEDS)
