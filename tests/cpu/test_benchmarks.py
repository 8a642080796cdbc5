import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fake_peers import FAKES
from graphs import ON_CPU

from benchmarks import (
    graphs,
    measure,
    peers,
    presets,
    providers,
    registry,
    rows,
    run,
    train,
)

ROOT = Path(__file__).parents[2]
WARM = "warm"
pytestmark = pytest.mark.skipif(not ON_CPU, reason="tests/gpu has its own")
FAST = measure.Options("cpu", seconds=0, least=2, memory=False)


@pytest.fixture(autouse=True)
def few_threads(one_thread):
    """Tiny tensors are faster on one thread."""


def measured(case, graph="power_law:60:400", dtype=torch.float32, names=("stock", "ours")):
    wanted = {(measure.STEP, WARM, name) for name in names}
    graph = graphs.read(graph) if isinstance(graph, str) else graph
    found = measure.measure(registry.case(case), graph, dtype, wanted, FAST)
    return {r["provider"]: r for r in found}


# The whole


def launch(*words):
    command = [sys.executable, "-m", "benchmarks.run", "--device", "cpu", "--threads", "1", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_quick_run_and_going_on(tmp_path):
    out = tmp_path / "quick.csv"
    launch("--quick", "--out", str(out))
    found = rows.read(out)  # the columns, and that no key is there twice
    if shutil.which("g++"):
        assert {r["status"] for r in found} == {"ok"}
    assert all(float(r["q1_ms"]) <= float(r["median_ms"]) <= float(r["q3_ms"]) for r in found)
    expected = {n for n, p in providers.PROVIDERS.items() if not p.absent("cpu")} | {"machine"}
    assert {r["provider"] for r in found} == expected
    assert all(r["commit"] and r["machine"] and r["torch"] and r["pyg"] for r in found)
    assert {r["mode"] for r in found if r["case"] == "GCNConv-16"} == set(presets.PASSES)
    # It goes on after a line that was cut off, and then has nothing to do.
    keys = {rows.key(r) for r in found}
    lines = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:-2]) + lines[-2][:20])
    launch("--quick", "--out", str(out))
    again = rows.read(out)
    assert {rows.key(r) for r in again} == keys
    assert again[: len(lines) - 3] == found[: len(lines) - 3]


def test_filter_budget_and_one_row_for_a_key(tmp_path, capsys):
    out = tmp_path / "rows.csv"
    words = ["--quick", "--device", "cpu", "--filter", "spmm-16 .* stock$", "--out", str(out)]
    assert run.main([*words, "--budget", "1e-9"]) == 0
    assert rows.read(out) == []
    assert run.main(words) == 0
    (found,) = rows.read(out)
    assert (found["case"], found["provider"], found["status"]) == ("spmm-16", "stock", "ok")
    assert run.main(words) == 0
    assert len(rows.read(out)) == 1
    assert "nothing left" in capsys.readouterr().out


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("preset", presets.PRESETS)
def test_plans_are_complete_and_have_no_row_twice(preset, device, capsys):
    words = ["--preset", preset, "--device", device, "--list"]
    assert run.main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines
    assert len(lines) == len(set(lines))
    assert any(line.endswith(" ours") for line in lines)


def test_cases_and_graphs_of_the_command_line_replace_those_of_the_preset(capsys):
    words = ["--names", "grid:5", "bipartite:9:5:2", "--cases", "GCNConv-8", "max-8", "--list"]
    run.main(["--device", "cpu", *words])
    lines = capsys.readouterr().out.splitlines()
    names = {tuple(line.split()[:2]) for line in lines}
    assert names == {("grid:5", "GCNConv-8"), ("grid:5", "max-8"), ("bipartite:9:5:2", "max-8")}
    assert len(lines) == len(set(lines))


# The gate


def wrong_value(problem):
    yield providers.Variant(lambda: problem.run() * 1.001)


def wrong_gradient(problem):
    yield providers.Variant(lambda: problem.run() + 0.01 * (problem.run() - problem.run().detach()))


def no_gradient(problem):
    x = problem.tensors[0]
    yield providers.Variant(lambda: problem.run().detach() + 0 * x.sum())


def not_a_number(problem):
    yield providers.Variant(lambda: problem.run() * float("nan"))


def other_shape(problem):
    yield providers.Variant(lambda: problem.run()[:-1])


def second_is_wrong(problem):
    yield providers.Variant(problem.run, "first")
    yield from wrong_value(problem)


def raises(problem):
    raise RuntimeError("a reason\nand more")


def forgets(problem):
    raise torch.OutOfMemoryError("too large")


@pytest.mark.parametrize(
    ("make", "status", "note"),
    [
        (wrong_value, "wrong", "output: error 1"),
        (wrong_gradient, "wrong", "gradient 0: error"),
        (no_gradient, "wrong", "gives output, gradient 0, stock"),
        (not_a_number, "wrong", "output: error nan"),
        (other_shape, "wrong", "output: shape"),
        (second_is_wrong, "wrong", "output: error"),
        (raises, "error", "a reason"),
        (forgets, "out of memory", "too large"),
    ],
)
def test_a_provider_that_fails_is_reported_and_not_timed(monkeypatch, make, status, note):
    bad = providers.Provider("bad", make, providers.PROVIDERS["stock"].takes)
    monkeypatch.setitem(providers.PROVIDERS, "bad", bad)
    found = measured("GCNConv-8", names=("bad", "ours"))
    assert found["bad"]["status"] == status
    assert note in found["bad"]["note"]
    assert "\n" not in found["bad"]["note"]
    assert "median_ms" not in found["bad"]
    assert found["ours"]["status"] == "ok"


def test_a_lost_device_ends_the_run_and_is_the_fault_of_one(monkeypatch, tmp_path, capsys):
    bad = providers.Provider("bad", raises, lambda problem: problem.case.kind == "layer")
    known = {"bad": bad, "ours": providers.PROVIDERS["ours"]}
    monkeypatch.setattr(measure, "PROVIDERS", known)
    monkeypatch.setattr(run, "PROVIDERS", known)
    monkeypatch.setattr(run, "alive", lambda device: False)
    words = ["--device", "cpu", "--quick", "--names", "grid:4", "--cases", "GCNConv-8"]
    words += ["--filter", "float32 (forward|backward) ", "--out", str(tmp_path / "t.csv")]
    assert run.main(words) == 1
    found = rows.read(tmp_path / "t.csv")
    assert {(r["provider"], r["mode"]) for r in found} == {("bad", "forward"), ("bad", "backward")}
    monkeypatch.undo()
    monkeypatch.setattr(run, "PROVIDERS", known)
    monkeypatch.setattr(measure, "PROVIDERS", known)
    assert run.main(words) == 0
    assert {r["status"] for r in rows.read(tmp_path / "t.csv") if r["provider"] == "ours"} == {"ok"}


def test_a_graph_that_cannot_be_made_is_left_out(tmp_path, capsys):
    out = str(tmp_path / "t.csv")
    words = ["--quick", "--device", "cpu", "--names", "bad:1", "grid:4", "--out", out]
    assert run.main([*words, "--filter", "spmm-16 .* stock$"]) == 1
    assert [r["graph"] for r in rows.read(tmp_path / "t.csv")] == ["grid:4"]


def test_a_run_whose_fused_path_fails_ends_with_an_error(monkeypatch, tmp_path):
    bad = replace(providers.PROVIDERS["ours"], variants=wrong_value)
    monkeypatch.setitem(providers.PROVIDERS, "ours", bad)
    words = ["--quick", "--device", "cpu", "--filter", "spmm-16 .* ours$"]
    assert run.main([*words, "--out", str(tmp_path / "t.csv")]) == 1
    (found,) = rows.read(tmp_path / "t.csv")
    assert (found["status"], found["median_ms"]) == ("wrong", "")


def test_worse_than_stock_passes_within_twice_its_error(monkeypatch):
    # In half precision, results in float32 differ from stock's, but are nearer to the truth.
    found = measured("spmm-8", dtype=torch.bfloat16)
    assert {r["status"] for r in found.values()} == {"ok"}


def test_ties_in_half_precision_may_be_shared_by_other_rules():
    names = ("stock", "ours", "ours ties=first", "ours ties=exact")
    found = measured("max-8", dtype=torch.bfloat16, names=names)
    assert {r["status"] for r in found.values()} == {"ok"}, found


def test_without_a_reference_nothing_is_timed(monkeypatch):
    def fails(*args, **kwargs):
        raise MemoryError("no room")

    monkeypatch.setattr(measure, "Gate", fails)
    found = measured("spmm-8")
    assert {r["status"] for r in found.values()} == {"out of memory"}
    assert "no reference" in found["ours"]["note"]


def test_the_gate_can_be_on_another_graph(monkeypatch):
    small = graphs.read("grid:4")
    options = replace(FAST, gate_on=small)
    seen = []

    def watch(problem):
        seen.append(problem.graph.num_edges)
        yield providers.Variant(problem.run)

    spy = providers.Provider("spy", watch, lambda p: True)
    monkeypatch.setitem(providers.PROVIDERS, "spy", spy)
    case, wanted = registry.case("spmm-8"), {("forward", WARM, "spy")}
    list(measure.measure(case, graphs.read("grid:6"), torch.float32, wanted, options))
    assert small.num_edges in seen
    assert seen[-1] > small.num_edges


def test_the_fastest_variant_counts(monkeypatch):
    def two(problem):
        def slow():
            time.sleep(0.1)
            return problem.run()

        yield providers.Variant(slow, "slow")
        yield providers.Variant(problem.run, "fast")

    provider = providers.Provider("two", two, lambda p: True)
    monkeypatch.setitem(providers.PROVIDERS, "two", provider)
    found = measured("spmm-8", names=("two",))["two"]
    assert found["note"] == "fast"


def test_what_falls_back_is_noted():
    found = measured("GATConv-2x4")
    assert "in part on stock" in found["ours"]["note"] or found["ours"]["status"] == "ok"
    assert measured("GCNConv-8")["ours"]["note"] == ""


# Cases and providers


@pytest.mark.parametrize("name", registry.LAYERS)
def test_layers_run_fused_and_pass(name):
    found = measured(f"{name}-8")
    assert {r["status"] for r in found.values()} == {"ok"}, found
    assert found["ours"]["note"] == ""


@pytest.mark.parametrize("base", ["GATv2Conv", "TransformerConv"])
@pytest.mark.parametrize("graph", ["mesh:30", "bipartite:30:20:3", "molecules:2"])
def test_attention_with_edge_features_passes(base, graph):
    found = measured(f"{base}-2x4-edges", graph)
    assert {r["status"] for r in found.values()} == {"ok"}, found


@pytest.mark.parametrize("peer", peers.PEERS, ids=lambda peer: peer.name)
def test_calls_of_other_libraries_fit_their_signatures(monkeypatch, peer):
    FAKES[peer.name](monkeypatch)
    for op in peer.ops:
        case = registry.case(f"{op}-2x4" if op in registry.ATTENTION else f"{op}-8")
        for graph in ("power_law:40:200", "grid:5", "bipartite:20:30:3"):
            if graph.startswith("bipartite") and peer.name == "turbo_gnn":
                continue
            problem = registry.Problem.of(case, graphs.read(graph), torch.float32, "cpu")
            provider = replace(providers.PROVIDERS[peer.name], device="")
            assert provider.takes(problem)
            judge = measure.Gate(problem)
            variants = list(provider.variants(problem))
            assert variants
            for variant in variants:
                assert judge.verdict(variant.call) == "", f"{op} on {graph}, {variant.label}"


def test_absent_providers_say_why():
    found = providers.PROVIDERS["turbo_gnn"]
    assert found.absent("cpu") == "needs cuda"
    assert replace(found, module="no_such.module").absent("cuda") == "no module 'no_such.module'"
    assert providers.PROVIDERS["stock"].absent("cuda") == ""


@pytest.mark.parametrize("name", ["GCNConv", "GCNConv-4x8", "gatv2-8", "spmm-8-edges", "no-8"])
def test_unknown_cases_are_refused(name):
    with pytest.raises(ValueError, match=name.split("-")[0]):
        registry.case(name)


@pytest.mark.parametrize("name", ["spmm-32", "spmmw-32", "max-32", "gatv2-4x8", "transformer-4x8"])
def test_bytes_are_those_of_the_headers(name):
    graph, case = graphs.read("power_law:50:300"), registry.case(name)
    rows_ = 2 if name.startswith("transformer") else 1
    there = case.traffic(graph, "forward", 4)
    assert there.gathered == rows_ * 300 * 128
    assert there.total >= there.gathered + 300 * 4 + 50 * 128
    half = case.traffic(graph, "forward", 2)
    assert half.gathered == there.gathered // 2
    assert case.traffic(graph, "backward", 4).total > 0
    assert case.traffic(graph, measure.STEP, 4) is None


def test_structures_and_training_give_a_row_for_each_provider():
    graph = graphs.read("planted:200:2000")
    wanted = {("unsorted", WARM, "ours"), ("both directions", WARM, "EdgeIndex")}
    found = list(measure.structures(graph, wanted, FAST))
    assert {(r["mode"], r["l2"], r["provider"]) for r in found} == wanted
    assert {r["status"] for r in found} == {"ok"}
    wanted = {("epoch", WARM, "stock"), ("epoch", WARM, "ours")}
    case = registry.case("train_SAGE")
    found = list(train.measure(case, graph, wanted, FAST, epochs=20))
    assert {r["status"] for r in found} == {"ok"}
    assert all(float(r["accuracy"]) > 0.2 for r in found)
    (failed,) = train.measure(case, graphs.read("grid:4"), {("epoch", WARM, "ours")}, FAST)
    assert (failed["status"], failed["note"]) == ("error", "no labels")
