import dataclasses
import io
import zipfile

import numpy as np
import pytest
import torch

from pyg_ioaware import __main__ as command
from pyg_ioaware.cli.errors import CommandError
from pyg_ioaware.demo import MODELS, data, memory, npz, report
from pyg_ioaware.demo.worker import Net, Result, loss_of, score_of

GOOD = {
    "row": np.array([0, 1, 2, 0], np.int32),
    "col": np.array([1, 2, 3, 0], np.int32),
    "num_nodes": np.int64(4),
}
CSR = {
    "x_indptr": np.array([0, 1, 1, 2, 3]),
    "x_indices": np.array([0, 1, 1]),
    "x_shape": np.array([4, 2]),
}


def write(path, **arrays):
    np.savez(path, **arrays)
    return str(path)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "graph.npz"


BAD = {
    "no row": ({"row": None}, "has no 'row'"),
    "no num_nodes": ({"num_nodes": None}, "has no 'num_nodes'"),
    "lengths": ({"row": np.array([0, 1])}, "'row' and 'col' differ in length (2 and 4)"),
    "float indices": ({"row": np.ones(4)}, "'row' must hold integers"),
    "two-dimensional": ({"row": np.zeros((4, 1), int)}, "'row' must have one dimension"),
    "negative": ({"row": np.array([0, -1, 2, 0])}, "'row' holds -1, not in 0 to 3"),
    "too large": ({"col": np.array([1, 2, 4, 0])}, "'col' holds 4, not in 0 to 3"),
    "uint64": ({"row": np.full(4, 2**64 - 1, np.uint64)}, "'row' holds -1"),
    "no edges": ({"row": np.zeros(0, int), "col": np.zeros(0, int)}, "has no edges"),
    "no nodes": ({"num_nodes": 0}, "has no nodes"),
    "negative nodes": ({"num_nodes": -5}, "'num_nodes' must be in 0 to"),
    "huge": ({"num_nodes": 10**12}, "'num_nodes' must be in 0 to"),
    "huge features": ({"num_nodes": 2**31 - 1}, "its features need 512 GiB"),
    "nodes not a number": ({"num_nodes": np.array("four")}, "'num_nodes' must be one integer"),
    "nodes many": ({"num_nodes": np.array([4, 4])}, "'num_nodes' must be one integer"),
    "directed": ({"directed": np.array("yes")}, "'directed' must be one true or false"),
    "pickle": ({"row": np.array([0, None, 1, 2], object)}, "'row' cannot be read (Object arrays"),
    "x nan": ({"x": np.array([[1.0], [np.nan], [0], [0]])}, "'x' holds NaN or infinite values"),
    "x overflow": ({"x": np.full((4, 1), 1e300)}, "'x' holds NaN or infinite values"),
    "x rows": ({"x": np.zeros((3, 2))}, "'x' must have the shape [4, features] (got [3, 2])"),
    "x empty": ({"x": np.zeros((4, 0))}, "'x' must have the shape"),
    "x text": ({"x": np.full((4, 1), "a")}, "'x' must hold numbers"),
    "x complex": ({"x": np.zeros((4, 1), complex)}, "'x' must hold numbers"),
    "csr incomplete": ({**CSR, "x_indices": None}, "has no 'x_indices'"),
    "csr shape": ({**CSR, "x_shape": np.array([3, 2])}, "'x_shape' must be [4, features]"),
    "csr indptr": ({**CSR, "x_indptr": np.array([0, 2, 1, 2, 3])}, "'x_indptr' must rise"),
    "csr indices": ({**CSR, "x_indices": np.array([0, 1, 2])}, "'x_indices' holds 2"),
    "csr data": ({**CSR, "x_data": np.ones(2)}, "'x_data' must have 3 entries"),
    "y length": ({"y": np.zeros(3, int)}, "'y' must have 4 rows"),
    "y fractions": ({"y": np.array([0, 0.5, 1, 1])}, "'y' holds values that are not integers"),
    "y nan": ({"y": np.array([0, np.nan, 1, 1])}, "'y' holds values that are not integers"),
    "y text": ({"y": np.array(list("abcd"))}, "'y' must hold integers"),
    "y multi": ({"y": np.array([[0, 2]] * 4)}, "multi-label 'y' must hold 0 and 1 only"),
    "y unknown": ({"y": np.full(4, -1)}, "no node has a label"),
    "mask length": ({"train_mask": np.ones(3, bool)}, "'train_mask' must have 4 entries"),
    "mask values": ({"test_mask": np.full(4, 2)}, "'test_mask' must hold true and false"),
    "mask empty": ({"train_mask": np.zeros(4, bool)}, "no labelled node is left to train on"),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD)
def test_bad_file_gets_one_clear_line(change, message, path, tmp_path, capfd):
    arrays = {k: v for k, v in {**GOOD, **change}.items() if v is not None}
    write(path, **arrays)
    assert command.main(["demo", "--graph", str(path), "--out", str(tmp_path / "a.png")]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith(f"error: {path}: ")
    assert message in err


def _npy(array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        (b"", "not an .npz file"),
        (b"row,col\n0,1\n", "not an .npz file"),
        (b"PK\x03\x04 broken", "not an .npz file"),
        (b"\x80\x04]\x94.", "not an .npz file"),
        (_npy(np.zeros(3)), "not an .npz file, but a single array"),
    ],
)
def test_not_an_npz(content, message, path):
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CommandError, match=message):
        npz.read(str(path))


def test_damaged_members(path):
    write(path, **GOOD)
    whole = path.read_bytes()
    at = whole.index(GOOD["row"].tobytes())
    path.write_bytes(whole[:at] + b"\xff" + whole[at + 1 :])
    with pytest.raises(CommandError, match=r"'row' cannot be read \(Bad CRC-32"):
        npz.read(str(path))
    with zipfile.ZipFile(path, "w") as file:
        for name in ("row", "col", "num_nodes"):
            file.writestr(f"{name}.npy", b"\x93NUMPY\x01\x00 nonsense")
    with pytest.raises(CommandError, match="cannot be read"):
        npz.read(str(path))


def test_undirected_file_gets_its_reverse_edges(path):
    directed = npz.read(write(path, **GOOD))["edges"]
    assert directed.tolist() == [[0, 1, 2, 0], [1, 2, 3, 0]]
    both = npz.read(write(path, **GOOD, directed=False))["edges"]
    assert both.tolist() == [[0, 1, 2, 0, 1, 2, 3], [1, 2, 3, 0, 0, 1, 2]]


def test_sparse_features_and_splits(path):
    splits = np.array([[1, 0, 0, 1], [0, 1, 1, 0]], bool)
    write(path, **GOOD, **CSR, y=np.array([5, -1, 9, 5]), train_mask=splits)
    graph = data.from_file(str(path), 0)
    assert graph.x.tolist() == [[1, 0], [0, 0], [0, 1], [0, 1]]
    assert graph.y.tolist() == [0, 0, 1, 0]
    assert graph.train_mask.tolist() == [True, False, False, True]
    assert graph.test_mask.tolist() == [False, False, True, False]
    assert graph.outputs == 2


def test_wide_features_are_projected(path, monkeypatch):
    monkeypatch.setattr(data, "WIDEST", 7)
    monkeypatch.setattr(data, "PROJECTED", 3)
    graph = data.from_file(write(path, **GOOD, **CSR), 0)
    assert graph.x.shape == (4, 3)
    assert any("projected to 3" in note for note in graph.notes)


def test_missing_parts_are_filled_in_alike_for_a_seed(path):
    write(path, **GOOD)
    a, b, c = (data.from_file(str(path), seed) for seed in (0, 0, 1))
    assert torch.equal(a.x, b.x)
    assert torch.equal(a.train_mask, b.train_mask)
    assert not torch.equal(a.x, c.x)
    assert len(a.notes) == 3


def test_save_and_load(path, tmp_path):
    graph = data.from_file(write(path, **GOOD), 0)
    data.save(graph, str(tmp_path / "graph.pt"))
    copy = data.load(str(tmp_path / "graph.pt"))
    assert copy.name == graph.name == "graph"
    assert torch.equal(copy.edge_index, graph.edge_index)


def test_digits():
    pytest.importorskip("sklearn")
    graph = data.digits(0)
    assert graph.x.shape == (1797, 64)
    assert graph.outputs == 10
    row, col = graph.edge_index
    assert torch.equal((row * 1797 + col).sort().values, (col * 1797 + row).sort().values)
    assert torch.bincount(col).min() >= 10


def test_pyg_datasets(tmp_path, monkeypatch):
    assert data.from_pyg("karateclub", 0).outputs == 4
    with pytest.raises(CommandError, match="unknown data set 'nope': choose from Cora"):
        data.from_pyg("nope", 0)

    import torch_geometric.datasets

    def offline(*args):
        raise OSError("no\nnetwork")

    monkeypatch.setattr(torch_geometric.datasets, "Planetoid", offline)
    with pytest.raises(CommandError, match=r"^data set 'Cora' cannot be loaded: no network$"):
        data.from_pyg("CORA", 0, str(tmp_path))


def test_multi_label_loss_and_score():
    out = torch.tensor([[1.0, -1.0], [1.0, 1.0]])
    y = torch.tensor([[1, 0], [0, 1]])
    assert score_of(out, y) == pytest.approx(0.8)
    expected = torch.nn.functional.binary_cross_entropy_with_logits(out, y.float())
    assert torch.equal(loss_of(out, y), expected)


@pytest.mark.parametrize(
    ("model", "layer", "hidden"),
    [
        ("gcn", "GCNConv", 5),
        ("sage", "SAGEConv", 5),
        ("gatv2", "GATv2Conv", 8),
        ("transformer", "TransformerConv", 8),
    ],
)
def test_net_is_made_of_stock_layers(model, layer, hidden):
    net = Net(model, [3, 5, 5, 2], 0.5)
    assert [type(conv).__name__ for conv in net.convs] == [layer] * 3
    assert [conv.in_channels for conv in net.convs] == [3, hidden, hidden]
    assert {getattr(conv, "heads", 4) for conv in net.convs} == {4}
    assert {getattr(conv, "dropout", 0) for conv in net.convs} == {0}
    assert ({conv.aggr for conv in net.convs} == {"max"}) == (model == "sage")
    assert net(torch.randn(4, 3), torch.tensor([[0, 1], [1, 2]])).shape == (4, 2)


def test_every_model_has_a_net():
    assert all(Net(model, [3, 2], 0.5).convs for model in MODELS)


def result(losses, **changes):
    return dataclasses.replace(
        Result(losses, 0.9, 0.5, 0.1, 2**25, 2**29, fused_calls=4), **changes
    )


@pytest.mark.parametrize(
    ("losses", "where"),
    [
        ([2.0, 1.0], None),
        ([2.00001, 1.01], None),
        ([2.01, 1.0], "epoch 1"),
        ([2.0, 1.1], "epoch 2"),
        ([2.0, float("nan")], "epoch 2"),
    ],
)
def test_losses_that_part_are_found(losses, where):
    found = report.disagreement(result([2.0, 1.0]), result(losses))
    assert found is None if where is None else found.startswith(where)


def test_peak_memory_of_a_call():
    size = 64 * 2**20

    def call():
        torch.ones(size // 4, device="cpu")

    peak = memory.peak_of(call)
    if peak is None:
        pytest.skip("this system does not tell the peak of a call")
    assert 0.95 * size < peak < 1.5 * size
    assert memory.peak_of(lambda: None) < size // 4


@pytest.mark.slow
def test_demo_on_digits(tmp_path, capfd):
    pytest.importorskip("sklearn")
    picture = tmp_path / "demo.png"
    argv = ["demo", "--epochs", "12", "--hidden", "16", "--threads", "1", "--out", str(picture)]
    assert command.main([*argv, "--models", "sage", "gatv2"]) == 0
    out, err = capfd.readouterr()
    assert "digits (10 nearest neighbours): 1,797 nodes" in out
    for model in ("SAGE-max", "GATv2"):
        assert f"{model}: losses differ by at most" in out
    assert "Traceback" not in out + err
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_demo_on_a_multi_label_file(path, tmp_path, capfd):
    rng = np.random.default_rng(0)
    edges = rng.integers(30, size=(2, 90))
    write(path, row=edges[0], col=edges[1], num_nodes=30, y=rng.integers(2, size=(30, 3)))
    out = str(tmp_path / "demo.png")
    argv = [
        "demo",
        "--graph",
        str(path),
        "--models",
        "gcn",
        "transformer",
        "--epochs",
        "2",
        "--threads",
        "1",
        "--out",
        out,
    ]
    assert command.main(argv) == 0
    assert "test micro-F1" in capfd.readouterr().out


def test_a_worker_that_fails_is_one_line_at_the_end(tmp_path):
    pytest.importorskip("rich")
    from pyg_ioaware.demo.process import Worker
    from pyg_ioaware.demo.worker import Config

    config = Config(str(tmp_path / "none.pt"), "gcn", False, 4, 2, 0, 1)
    with (
        Worker(config, "GCN stock") as worker,
        pytest.raises(CommandError, match=r"^GCN stock: FileNotFoundError: ") as caught,
    ):
        worker.wait_ready()
    assert caught.value.code == 1


def test_out_must_be_writable(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    assert command.main(["demo", "--out", str(tmp_path / "none" / "a.png")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_missing_extra_is_named(monkeypatch, capsys):
    from pyg_ioaware.cli import errors

    monkeypatch.setattr(errors, "find_spec", lambda name: None)
    assert command.main(["demo"]) == 1
    assert capsys.readouterr().err == (
        "error: this needs rich, matplotlib: pip install 'pyg_ioaware[demo]'\n"
    )
