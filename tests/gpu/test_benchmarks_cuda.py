import pytest

from benchmarks import measure, roofline, rows, run

pytestmark = pytest.mark.gpu


def test_quick_run(tmp_path):
    out = tmp_path / "quick.csv"
    assert run.main(["--quick", "--device", "cuda", "--out", str(out)]) == 0
    found = rows.read(out)
    assert {r["status"] for r in found if r["provider"] in ("stock", "ours", "machine")} == {"ok"}
    assert all(r["driver"] and r["cuda"] and r["cupy"] for r in found)


def test_cold_and_host_times(tmp_path):
    out = tmp_path / "rows.csv"
    words = ["--device", "cuda", "--names", "power_law:2000:20000", "--out", str(out)]
    words += ["--filter", "(spmm-32|GCNConv-16) float32 (forward|host) .*(stock|ours)$"]
    assert run.main([*words, "--cases", "spmm-32", "GCNConv-16"]) == 0
    found = rows.read(out)
    assert {(r["mode"], r["l2"]) for r in found} >= {("forward", "cold"), ("host", "warm")}


def test_gather_rate():
    options = measure.Options("cuda", seconds=0, least=2)
    wanted = {("rows of 512 in 4096 KiB", "warm", "machine")}
    (found,) = roofline.measure("gather", wanted, options)
    assert found["status"] == "ok", found


def test_ways_to_gather_agree():
    import torch

    table = torch.randn(100, 32, device="cuda")
    index = torch.randint(100, (64 * roofline.BAG,), device="cuda")
    ways = roofline.gatherers(table, index)
    assert set(ways) == {"embedding_bag", "index_select", "kernel"}
    want = table[index].view(-1, roofline.BAG, 32).sum(1)
    assert torch.allclose(ways["embedding_bag"](), want, atol=1e-4)
    assert torch.allclose(ways["kernel"](), want, atol=1e-4)
