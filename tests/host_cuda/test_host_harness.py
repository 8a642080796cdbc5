"""The harness against planted faults: each is caught, and its correct twin is not."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime import COMPILER, HERE, HostError, HostRuntime, sanitizer_environment
from torch import Tensor

from pyg_ioaware.engines.cuda.launch import Kernel

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

SEEDS = range(24)
NAN = float("nan")
_KINDS = {torch.float32: "T*", torch.int32: "i32*", torch.int64: "i64*"}


def run(
    folder: Path, body: str, *args: Tensor | int, blocks: int = 1, threads: int = 64, seed: int = 0
) -> None:
    """Runs a kernel with parameters a, b, ... on float or int tensors, and integers."""
    kinds = [_KINDS[a.dtype] if isinstance(a, Tensor) else "i32" for a in args]
    types = {"T*": "float*", "i32*": "int*", "i64*": "long long*", "i32": "int"}
    names = "abcdefgh"[: len(args)]
    given = ", ".join(f"{types[kind]} {name}" for kind, name in zip(kinds, names, strict=True))
    text = f'extern "C" __global__ void __launch_bounds__(THREADS) probe({given}) {{\n{body}\n}}\n'
    (folder / "probe.cu").write_text("#define FULL 0xffffffffu\n" + text)
    probe = Kernel("probe", "probe", list(zip(names, kinds, strict=True)))
    runtime = HostRuntime(seed, kernels=folder)
    probe(runtime, (("SCALAR", 0), ("INDEX", 32)), (blocks, 1), threads, *args)


@pytest.fixture
def results(tmp_path: Path) -> Callable[..., list[list[float]]]:
    """Runs a kernel that writes one float per thread, once for each seed."""

    def run_all(body: str, blocks: int = 1, threads: int = 64) -> list[list[float]]:
        found = []
        for seed in SEEDS:
            out = torch.full((blocks * threads,), NAN)
            run(tmp_path, body, out, blocks=blocks, threads=threads, seed=seed)
            found.append(out.nan_to_num(nan=-1.0).tolist())
        return found

    return run_all


REVERSE = """
  __shared__ float values[THREADS];
  values[threadIdx.x] = threadIdx.x;
  BARRIER
  a[threadIdx.x] = values[THREADS - 1 - threadIdx.x];
"""
# Each round overwrites what the one before reads.
ROUNDS = """
  __shared__ float values[THREADS];
  float sum = 0;
  for (int round = 1; round <= 3; round++) {
    values[threadIdx.x] = round;
    __syncthreads();
    sum += values[(threadIdx.x + 33) % THREADS];
    BARRIER
  }
  a[threadIdx.x] = sum;
"""
WITHIN_WARP = """
  __shared__ float values[THREADS];
  values[threadIdx.x] = threadIdx.x;
  BARRIER
  a[threadIdx.x] = values[threadIdx.x ^ 5];
"""


@pytest.mark.parametrize(
    ("body", "barrier", "right"),
    [
        (REVERSE, "__syncthreads();", [63.0 - i for i in range(64)]),
        (ROUNDS, "__syncthreads();", [6.0] * 64),
        (WITHIN_WARP, "__syncwarp();", [float(i ^ 5) for i in range(64)]),
    ],
    ids=["before_read", "before_next_write", "within_warp"],
)
def test_a_missing_barrier_shows(
    results: Callable[..., list[list[float]]], body: str, barrier: str, right: list[float]
) -> None:
    assert results(body.replace("BARRIER", barrier)) == [right] * len(SEEDS)
    wrong = results(body.replace("BARRIER", ""))
    assert sum(found != right for found in wrong) > len(SEEDS) // 2
    assert len({tuple(found) for found in wrong}) > 1


def test_orders_come_from_the_seed(tmp_path: Path) -> None:
    body = "a[atomicAdd(b, 1)] = blockIdx.x * THREADS + threadIdx.x;"
    orders = []
    for seed in (*SEEDS, 0):
        order, ticket = torch.zeros(256, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        run(tmp_path, body, order, ticket, blocks=4, threads=64, seed=seed)
        assert sorted(order.tolist()) == list(range(256))
        orders.append(tuple(order.tolist()))
    assert orders[-1] == orders[0]
    assert len(set(orders)) == len(SEEDS)


def test_an_unwritten_row_shows(tmp_path: Path) -> None:
    for last, unwritten in (("b", 0), ("b - 1", 1)):
        out = torch.full((10,), NAN)
        run(tmp_path, f"if (threadIdx.x < {last}) a[threadIdx.x] = 1;", out, 10)
        assert out.isnan().sum() == unwritten


def test_shared_memory_is_poisoned_for_each_block(tmp_path: Path) -> None:
    body = """
      __shared__ float values[THREADS];
      a[blockIdx.x * THREADS + threadIdx.x] = values[threadIdx.x];
      values[threadIdx.x] = 1;
    """
    out = torch.zeros(192)
    run(tmp_path, body, out, blocks=3)
    assert out.isnan().all()


def test_a_tail_that_is_off_by_one_shows(tmp_path: Path) -> None:
    for condition, after in (("i < b", 7.0), ("i <= b", 1.0)):
        whole = torch.full((101,), 7.0)
        body = f"const int i = blockIdx.x * THREADS + threadIdx.x; if ({condition}) a[i] = 1;"
        run(tmp_path, body, whole[:100], 100, blocks=2)
        assert whole[100] == after


# What a kernel does wrong, and what the error says.
REFUSED = {
    "mask_without_itself": (
        "a[threadIdx.x] = __shfl_sync(0xffffu, 1.0f, 0);",
        r"probe, block \(0, 0\), warp \d, lane \d+: __shfl_sync \(probe.cu:3\) with mask "
        "0x0000ffff, in which it is not",
    ),
    "reads_outside_mask": (
        "if (threadIdx.x < 16) a[threadIdx.x] = __shfl_xor_sync(0xffffu, 1.0f, 16);",
        "__shfl_xor_sync .* reads lane [0-9]+, which is not in mask 0x0000ffff",
    ),
    "lanes_have_ended": (
        "if (threadIdx.x % 32 >= 30) return; a[threadIdx.x] = __shfl_xor_sync(FULL, 1.0f, 1);",
        "__shfl_xor_sync .* with mask 0xffffffff waits for lanes 30, 31: lane 30 has ended",
    ),
    "lanes_at_the_barrier": (
        "if (threadIdx.x == 7) __syncthreads(); a[threadIdx.x] = __any_sync(FULL, 1);",
        r"__any_sync .* waits for lanes 7: lane 7 waits at __syncthreads \(probe.cu:3\)",
    ),
    "lanes_with_another_mask": (
        "a[threadIdx.x] = __ballot_sync(threadIdx.x % 32 < 8 ? 0xffu : FULL, 1);",
        "__ballot_sync .* waits for lanes 0, 1, 2, 3, 4, 5, 6, 7: lane 0 ",
    ),
    "lanes_that_do_not_exist": (
        "if (threadIdx.x >= 32) a[threadIdx.x] = __reduce_add_sync(FULL, 1);",
        "warp 1, .* with mask 0xffffffff waits for lanes 16, .*: lane 16 does not exist",
    ),
    "another_operation": (
        "a[threadIdx.x] = threadIdx.x % 2 ? __any_sync(FULL, 1) : __all_sync(FULL, 1);",
        r"__a\w+_sync .* meets lane \d+ at __a\w+_sync",
    ),
    "two_barriers": (
        "if (threadIdx.x < 32)\n __syncthreads();\n else\n __syncthreads();",
        r"waits at __syncthreads \(probe.cu:\d\), but others of its block at __syncthreads",
    ),
    "misaligned": ("a[0] = __ldg((const float4*)(a + 1)).x;", "a load of 16 bytes at 0x"),
    "assertion": ("assert(threadIdx.x < 40);", r"probe.cu:3: assert\(threadIdx.x < 40\)"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_what_a_kernel_must_not_do_is_an_error(tmp_path: Path, fault: str) -> None:
    body, message = REFUSED[fault]
    out = torch.zeros(64)
    for seed in (1, 2, 3):
        with pytest.raises(HostError, match=message):
            run(tmp_path, body, out, threads=48, seed=seed)
    run(tmp_path, "a[threadIdx.x] = 1;", out)
    assert out.eq(1).all()


# An expression of the lane, and its value in each of the 64 lanes of two warps.
VALUES: dict[str, tuple[str, Callable[[int], Any]]] = {
    "up": ("__shfl_up_sync(FULL, lane, 3)", lambda i: i % 32 - 3 if i % 32 >= 3 else i % 32),
    "up_in_8": ("__shfl_up_sync(FULL, lane, 3, 8)", lambda i: i % 32 - 3 * (i % 8 >= 3)),
    "down": ("__shfl_down_sync(FULL, lane, 5)", lambda i: i % 32 + 5 * (i % 32 < 27)),
    "down_in_4": ("__shfl_down_sync(FULL, lane, 1, 4)", lambda i: i % 32 + (i % 4 < 3)),
    "xor": ("__shfl_xor_sync(FULL, (double)lane, 9)", lambda i: i % 32 ^ 9),
    "from_one": ("__shfl_sync(FULL, lane, 5)", lambda i: 5),
    "from_one_of_8": ("__shfl_sync(FULL, (long long)lane, 5, 8)", lambda i: i % 32 // 8 * 8 + 5),
    "ballot": ("__popc(__ballot_sync(FULL, lane % 3 == 0))", lambda i: 11),
    "any": ("__any_sync(FULL, threadIdx.x == 40)", lambda i: int(i >= 32)),
    "all": ("__all_sync(FULL, threadIdx.x != 40)", lambda i: int(i < 32)),
    "add": ("__reduce_add_sync(FULL, lane - 1)", lambda i: 496 - 32),
    "min": ("__reduce_min_sync(FULL, lane - 9)", lambda i: -9),
    "max": ("__reduce_max_sync(FULL, lane - 99)", lambda i: -68),
    "unsigned_max": ("__reduce_max_sync(FULL, (unsigned)lane)", lambda i: 31),
    "match": ("__popc(__match_any_sync(FULL, lane % 5))", lambda i: 7 if i % 32 % 5 < 2 else 6),
    "count": ("__syncthreads_count(lane % 4 == 0)", lambda i: 16),
    "or": ("__syncthreads_or(threadIdx.x == 63)", lambda i: 1),
    "and": ("__syncthreads_and(threadIdx.x != 63)", lambda i: 0),
    "bits": ("__ffs(lane) + __clz(lane + 1) + __brev(1u << 31)", None),
    "float_bits": ("__int_as_float(0x3f800000 + (lane << 23))", lambda i: 2.0 ** (i % 32)),
    "order": ("min(lane, 7) + max(2u, (unsigned)lane)", lambda i: min(i % 32, 7) + max(2, i % 32)),
}
VALUES["bits"] = (
    VALUES["bits"][0],
    lambda i: ((i % 32) & -(i % 32)).bit_length() + 32 - (i % 32 + 1).bit_length() + 1,
)


@pytest.mark.parametrize("name", VALUES)
def test_intrinsics(tmp_path: Path, name: str) -> None:
    expression, value = VALUES[name]
    for seed in (1, 2, 3):
        out = torch.full((64,), NAN)
        body = f"const int lane = threadIdx.x % 32; a[threadIdx.x] = {expression};"
        run(tmp_path, body, out, seed=seed)
        assert out.tolist() == [value(i) for i in range(64)]


def test_groups_of_lanes_go_their_own_ways(results: Callable[..., list[list[float]]]) -> None:
    body = """
      const int group = threadIdx.x / 8, first = threadIdx.x % 32 / 8 * 8;
      const unsigned mask = 0xffu << first;
      float value = threadIdx.x % 8;
      for (int round = 0; round < group; round++)
        value += __shfl_sync(mask, value, first + round % 8);
      if (group % 2) __syncwarp(mask);
      __syncthreads();
      a[threadIdx.x] = value;
    """
    found = results(body)
    assert found == [found[0]] * len(SEEDS)
    for group in range(8):
        values = [float(i) for i in range(8)]
        for step in range(group):
            values = [v + values[step % 8] for v in values]
        assert found[0][8 * group : 8 * group + 8] == values


def test_threads_that_ended_are_not_waited_for(results: Callable[..., list[list[float]]]) -> None:
    body = """
      __shared__ float values[THREADS];
      if (threadIdx.x >= 40) return;
      values[threadIdx.x] = threadIdx.x;
      __syncthreads();
      a[threadIdx.x] = values[39 - threadIdx.x];
    """
    assert results(body) == [[39.0 - i if i < 40 else -1.0 for i in range(64)]] * len(SEEDS)


def test_atomics(tmp_path: Path) -> None:
    body = """
      atomicAdd(a, 0.5f);
      atomicAdd(b, 1), atomicMax(b + 1, (int)threadIdx.x), atomicMin(b + 2, -(int)threadIdx.x);
      atomicAdd((unsigned long long*)c, 1ull << 32);
      for (int old = b[3], seen; (seen = atomicCAS(b + 3, old, old + 2)) != old; old = seen) {}
    """
    a, b, c = torch.zeros(1), torch.zeros(4, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    run(tmp_path, body, a, b, c, blocks=2)
    assert (a.item(), b.tolist(), c.item()) == (64.0, [128, 63, -63, 256], 128 << 32)


# What only the sanitizers see, and what they call it; None is a correct twin.
WATCHED = {
    "in_bounds": ("b[threadIdx.x] = a[threadIdx.x];", None),
    "read_after_the_end": ("b[threadIdx.x] = a[threadIdx.x + 1];", "heap-buffer-overflow"),
    "read_before_the_start": ("b[threadIdx.x] = a[(int)threadIdx.x - 1];", "heap-buffer-overflow"),
    "write_after_the_end": ("b[threadIdx.x + 1] = a[threadIdx.x];", "heap-buffer-overflow"),
    "shared_after_the_end": (
        "__shared__ float s[THREADS]; float* at = s + c; at[threadIdx.x] = 0; b[0] = s[0];",
        "global-buffer-overflow|insufficient space",
    ),
    "shared_in_bounds": (
        "__shared__ float s[THREADS]; s[threadIdx.x] = 0; __syncthreads();"
        "b[threadIdx.x] = s[63 - threadIdx.x];",
        None,
    ),
    "array_of_a_lane": (
        "float s[4]; for (int i = 0; i < c; i++) s[i] = a[i]; b[threadIdx.x] = s[threadIdx.x & 3];",
        "stack-buffer-overflow|out of bounds",
    ),
    "misaligned_store": ("*(float4*)(b + 1) = make_float4(0, 0, 0, 0);", "misaligned address"),
    "shift": ("b[threadIdx.x] = 1u << (threadIdx.x + 1);", "shift exponent 32 is too large"),
}
CHILD = """
import os, sys, tempfile, traceback
from pathlib import Path
import torch
from test_host_harness import WATCHED, run

for name, (body, _) in WATCHED.items():
    folder = Path(tempfile.mkdtemp(dir=sys.argv[1]))
    child = os.fork()  # a report ends the process
    if not child:
        os.dup2(os.open(f"{sys.argv[1]}/{name}", os.O_WRONLY | os.O_CREAT), 2)
        try:
            run(folder, body, torch.zeros(64), torch.zeros(64), 5)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    os.waitpid(child, 0)
"""


@pytest.mark.slow
def test_sanitizers_see_what_nothing_else_does(tmp_path: Path) -> None:
    path = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, **sanitizer_environment(), "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHILD, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    for name, (_, message) in WATCHED.items():
        said = (tmp_path / name).read_text()
        if message is None:
            assert said == "", name
        else:
            assert any(part in said for part in message.split("|")), f"{name}: {said}"
            assert "probe.cu:3" in said, f"{name}: {said}"
