"""The cache under threads, the collector, forks, and a stream of graphs that never come again."""

import gc
import os
import signal
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from child import run_python
from graphs import ON_CPU, features, random_edges
from torch.utils.data import DataLoader, Dataset
from torch_geometric.nn import GCNConv, SAGEConv

import pyg_ioaware
from pyg_ioaware.graph.cache import CACHE, Cache

C = 8
N = 12


def result(conv, x, edge_index):
    """Returns the output and all gradients of one training step."""
    x = x.detach().requires_grad_()
    out = conv(x, edge_index)
    leaves = [x, *conv.parameters()]
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


# Graphs of one size: nothing but the identity of their memory tells them apart.


def test_no_cross_graph_hit_over_100_000_fresh_graphs():
    """A key made of addresses, shapes and versions fails here within a few graphs."""
    cache, wrong = Cache(), 0
    for i in range(100_000):
        edge_index = torch.tensor([i, i + 1])
        found = cache.get("sum", (edge_index,), edge_index.tolist, lambda value: 1)
        wrong += found != [i, i + 1]
    assert wrong == 0
    del edge_index
    assert cache.info().entries == 0


def test_no_cross_graph_hit_over_fresh_structures():
    for i in range(2_000):
        edge_index = torch.tensor([[i % 7, i % 5, i % 3], [0, i % 2, 1]])
        adj = CACHE.adjacency(*edge_index, 7, 2)
        src, dst = adj.edges()
        expected = sorted(zip(edge_index[1].tolist(), edge_index[0].tolist(), strict=True))
        assert sorted(zip(dst.tolist(), src.tolist(), strict=True)) == expected
    assert CACHE.info().entries <= 2


@pytest.mark.parametrize(("conv", "runs"), [(GCNConv, 700), (SAGEConv, 1500)])
def test_no_cross_graph_hit_through_layers(conv, runs):
    """Same number of nodes and edges, and addresses that the allocator hands out again."""
    conv, x, addresses = (
        conv(C, C, aggr="max" if conv is SAGEConv else "sum"),
        features(N, C),
        set(),
    )
    outs = []
    with torch.no_grad():
        with pyg_ioaware.patched():
            for i in range(runs):
                edge_index = random_edges(N, N, 20, seed=i)
                addresses.add(edge_index.data_ptr())
                outs.append(conv(x, edge_index))
        assert len(addresses) < runs, "no address was used twice: the test proves nothing"
        for i, out in enumerate(outs):
            torch.testing.assert_close(out, conv(x, random_edges(N, N, 20, seed=i)))


@pytest.mark.parametrize("training", [True, False])
def test_new_graph_every_call_does_not_grow(training):
    """What a loader does: every batch is new, and none is ever seen again."""
    convs = [GCNConv(C, C), SAGEConv(C, C, aggr="max")]
    x = features(N, C).requires_grad_(training)
    pyg_ioaware.patch()
    held = []
    for i in range(500):
        edge_index = random_edges(N, N, 30, seed=i)
        for conv in convs:
            out = conv(x, edge_index)
            if training:
                out.sum().backward()
        if i in (50, 499):
            gc.collect()
            info = CACHE.info()
            tensors = sum(isinstance(o, torch.Tensor) for o in gc.get_objects())
            held.append((info.entries, info.nbytes, tensors))
    assert held[0] == held[1]
    assert info.entries <= 4
    del edge_index
    assert CACHE.info().entries == 0


def test_memory_is_flat_over_500_large_batches():
    out = run_python(
        """
        import resource, torch, pyg_ioaware
        from graphs import random_edges
        from torch_geometric.nn import GCNConv
        pyg_ioaware.patch()
        conv, x = GCNConv(4, 4), torch.randn(1000, 4, requires_grad=True)
        for i in range(500):
            conv(x, random_edges(1000, 1000, 10_000, seed=i)).sum().backward()
            if i in (50, 499):
                print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        """
    )
    early, late = map(int, out.split())
    one_batch = 10_000 * 2 * 8 // 1024
    assert late - early < 50 * one_batch, f"{late - early} KiB more after 450 batches"


# Threads.


def test_threads_share_and_own_graphs():
    conv = {"gcn": GCNConv(C, C), "max": SAGEConv(C, C, aggr="max")}
    shared = [random_edges(N, N, 30, seed=s) for s in range(3)]
    inputs = [features(N, C, seed=s) for s in range(3)]
    own = [random_edges(N, N, 30, seed=100 + s) for s in range(40)]
    expected = {
        (name, i): result(layer, inputs[i % 3], (shared + own)[i])
        for name, layer in conv.items()
        for i in range(43)
    }
    stop = threading.Event()

    def disturb():
        while not stop.is_set():
            pyg_ioaware.invalidate(shared[0])
            pyg_ioaware.stats()
            pyg_ioaware.clear_cache()
            time.sleep(0.0005)

    def work(seed):
        for i in range(30):
            number = (seed * 7 + i) % 43
            edges = shared[number] if number < 3 else own[number - 3].clone()
            for name, layer in conv.items():
                found = result(layer, inputs[number % 3], edges)
                torch.testing.assert_close(found, expected[name, number])

    pyg_ioaware.patch()
    disturber = threading.Thread(target=disturb, daemon=True)
    disturber.start()
    try:
        with ThreadPoolExecutor(8) as pool:
            for done in [pool.submit(work, seed) for seed in range(8)]:
                done.result(timeout=120)
    finally:
        stop.set()
        disturber.join(timeout=60)
    assert not disturber.is_alive()


def test_first_gradient_from_many_threads():
    """The rows by source are built once, by whoever needs them first."""
    edge_index, x = random_edges(N, N, 30), features(N, C)
    conv = SAGEConv(C, C)
    expected = result(conv, x, edge_index)
    pyg_ioaware.patch()
    barrier = threading.Barrier(6)

    def work():
        barrier.wait()
        return result(conv, x, edge_index)

    with ThreadPoolExecutor(6) as pool:
        for done in [pool.submit(work) for _ in range(6)]:
            torch.testing.assert_close(done.result(timeout=60), expected)


# The garbage collector may run anywhere, our lock included.


class Cycle:
    """Lets go of a tensor only when the collector finds it."""

    def __init__(self, tensor):
        self.tensor, self.me = tensor, self


@pytest.fixture
def eager_collector():
    before = gc.get_threshold()
    gc.set_threshold(1)
    yield
    gc.set_threshold(*before)


@pytest.mark.usefixtures("eager_collector")
def test_collector_inside_the_lock():
    conv, x = SAGEConv(C, C), features(N, C)
    pyg_ioaware.patch()

    def work():
        for i in range(60):
            edge_index = random_edges(N, N, 20, seed=i)
            conv(x, edge_index)
            Cycle(edge_index)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads), "deadlock"
    gc.collect()
    assert CACHE.info().entries == 0


def test_collector_inside_build():
    """The graph dies, and others with it, while a structure is being built."""
    cache = Cache()
    for i in range(20):
        cyclic = torch.tensor([i])
        cache.get("old", (cyclic,), object, lambda value: 1)
        Cycle(cyclic)
        del cyclic
    anchor = torch.tensor([0])

    def build():
        gc.collect()
        return cache.get("inner", (anchor,), lambda: "inner", lambda value: 1)

    assert cache.get("outer", (anchor,), build, lambda value: 1) == "inner"
    assert cache.info().entries == 2


def test_finaliser_that_calls_the_cache():
    """User code that runs in the collector may call us while we hold the lock."""
    cache, calls = Cache(), []
    anchor = torch.tensor([0])

    class Value:
        def __del__(self):
            calls.append(cache.info().entries)
            cache.clear()

    tensor = torch.tensor([1])
    weakref.finalize(tensor, lambda: cache.invalidate(anchor))
    cache.get("value", (tensor,), Value, lambda value: 1)
    cache.get("value", (anchor,), Value, lambda value: 1)
    del tensor
    cache.info()
    assert calls
    assert cache.info().entries == 0


# Processes.

can_fork = pytest.mark.skipif(
    not hasattr(os, "fork") or not ON_CPU, reason="needs fork, after which CUDA cannot be used"
)


@can_fork
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("busy", [False, True], ids=["quiet", "busy"])
def test_fork_after_use(busy):
    """A child of a process that has computed, or is computing in other threads, computes too."""
    # Large enough that the parent's kernels run on several threads.
    convs = [GCNConv(64, 64), SAGEConv(64, 64, aggr="max")]
    x, edge_index = features(300, 64), random_edges(300, 300, 6000)
    expected = [result(conv, x, edge_index) for conv in convs]
    pyg_ioaware.patch()
    for conv in convs:
        result(conv, x, edge_index)
    stop = threading.Event()

    def work():
        while not stop.is_set():
            pyg_ioaware.clear_cache()
            result(convs[0], x, edge_index)

    thread = threading.Thread(target=work, daemon=True)
    if busy:
        thread.start()
    try:
        for _ in range(12 if busy else 2):
            assert fork(lambda: check(convs, x, edge_index, expected)) == 0
    finally:
        stop.set()
        if busy:
            thread.join(timeout=60)


def check(convs, x, edge_index, expected):
    torch.set_num_threads(1)  # torch's own pool does not survive a fork
    for edges in (edge_index, edge_index.clone()):
        for conv, known in zip(convs, expected, strict=True):
            torch.testing.assert_close(result(conv, x, edges), known)


def fork(work, limit=60):
    """Runs work in a forked child; returns its exit status, -1 if it does not end in time."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException as error:
            print(error, file=sys.stderr, flush=True)
        finally:
            os._exit(status)
    end = time.monotonic() + limit
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return -1


class Embeddings(Dataset):
    """Runs a layer in the worker, as feature pipelines do."""

    def __init__(self, conv, edge_index):
        self.conv, self.edge_index = conv, edge_index

    def __len__(self):
        return 4

    def __getitem__(self, seed):
        with torch.no_grad():
            return self.conv(features(N, C, seed=seed), self.edge_index)


@can_fork
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize(("layer", "method"), [("gcn", "fork"), ("max", "fork"), ("max", "spawn")])
def test_loader_workers(layer, method):
    """Workers by fork run fused; workers by spawn load the pickle and run stock."""
    conv = GCNConv(C, C) if layer == "gcn" else SAGEConv(C, C, aggr="max")
    data = Embeddings(conv, random_edges(N, N, 30))
    expected = [data[i] for i in range(4)]
    pyg_ioaware.patch()
    data[0]
    loader = DataLoader(
        data, batch_size=None, num_workers=2, multiprocessing_context=method, timeout=120
    )
    torch.testing.assert_close(list(loader), expected)
    assert CACHE.info().entries > 0
