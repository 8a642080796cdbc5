r"""What ``--preset`` measures: lists of graphs, cases and modes.

The configurations of ``paper`` are those of arXiv:2605.31500 that are known here: its attention
shapes (2 heads of 64 channels, 8 of 32, 8 of 128) and widths (64 to 512). Its graphs are not at
hand, nor their sizes: the graphs are synthetic, and named so.
"""

from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure import STEP
from benchmarks.registry import LAYERS, TRAINED

NONE = "none"
"""Stands for a graph where none is needed."""
PASSES = ("forward", "backward", STEP)


@dataclass(frozen=True)
class Study:
    r"""Every case on every graph.

    Attributes:
        graphs (tuple): Names of graphs that are made.
        cases (tuple): Names of cases.
        dtypes (tuple): Names of dtypes.
        modes (tuple): What is timed of operations and layers.
        l2 (tuple): States of a GPU's L2 cache.
        providers (tuple): Who is measured; empty for all.
        without (tuple): Who is not.
        gate_on (str): Where results are compared, if not on the graph itself.
        files (tuple): Names of graphs that are read with ``--graphs``, where they are there.
    """

    graphs: tuple[str, ...]
    cases: tuple[str, ...]
    dtypes: tuple[str, ...] = ("float32",)
    modes: tuple[str, ...] = PASSES
    l2: tuple[str, ...] = ("warm",)
    providers: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    gate_on: str = ""
    files: tuple[str, ...] = ()

    def names(self, folder: Path | None) -> tuple[str, ...]:
        """Returns the graphs that can be had."""
        if folder is None:
            return self.graphs
        there = (f for f in self.files if (folder / f"{f.partition('@')[0]}.npz").exists())
        return (*self.graphs, *there)


OPS = ("spmm-128", "spmmw-128", "max-128", "gatv2-4x32", "transformer-4x32")
FOUR = ("GCNConv-128", "SAGEConv_max-128", "GATv2Conv-4x32", "TransformerConv-4x32")
EDGES = ("GATv2Conv-4x32-edges", "TransformerConv-4x32-edges")
TRAIN = tuple(f"train_{name}" for name in TRAINED if name != "loader")
MACHINE = ("copy", "gather")
TINY = ("cora", "karate_club")
CPU_FILES = (
    *("tolokers", "amazon_computers", "coauthor_physics"),
    *("web_notredame", "roads_rome"),
)
CUDA_FILES = (
    *("tolokers", "web_cnr2000", "gene_pubmed@400"),
    *("debian_contents", "mesh_wave", "roads_moscow"),
)

FORMS = ("EdgeIndex", "SparseTensor")
SLOW = (*FORMS, "torch.compile")  # where graphs change at each step, or nothing fits
CPU = (
    Study((NONE,), MACHINE),
    Study(("power_law:20000:400000",), (*FOUR, *OPS, "structure"), files=CPU_FILES[:1]),
    Study((), FOUR, modes=(STEP,), without=FORMS, files=CPU_FILES),
    Study((), OPS, modes=PASSES[:2], providers=("stock", "ours"), files=CPU_FILES[1:2]),
    Study(
        ("molecules:1000", "sampled:100000:2000000:512"),
        (*FOUR, *EDGES),
        modes=(STEP,),
        without=SLOW,
    ),
    Study(
        ("mesh:40000", "bipartite:40000:20000:8"),
        (*EDGES, "transformer-4x32"),
        modes=(STEP,),
        without=SLOW,
    ),
    Study((), FOUR, modes=(STEP,), without=FORMS, files=TINY),
    Study((), TRAIN, files=("amazon_computers",)),
    Study((), ("train_loader",), files=("coauthor_cs",)),
    Study((), ("structure",), files=CPU_FILES[1:]),
)
LIKE = ("arxiv-like", "tolokers-like", "road-like", "products4-like")
PEERS = ("stock", "ours", "torch CSR", "Anemoi", "cudnn.gnn", "turbo_gnn", "dgl")
CUDA = (
    Study((NONE,), MACHINE),
    Study(("power_law:2000:10000",), FOUR, modes=("host", STEP), without=FORMS, files=TINY),
    Study(LIKE[:3], FOUR, modes=(STEP,), without=FORMS, files=(*CUDA_FILES[:2], *CUDA_FILES[3:])),
    Study((), FOUR, modes=(STEP,), without=SLOW, files=CUDA_FILES[2:3]),
    Study(
        LIKE[:3],
        OPS,
        ("float32", "bfloat16"),
        PASSES[:2],
        providers=PEERS,
        files=CUDA_FILES,
    ),
    Study(  # stock PyG and its reference do not fit there
        LIKE[3:],
        OPS,
        ("float32", "bfloat16"),
        PASSES[:2],
        providers=("ours", "torch CSR"),
        gate_on="arxiv-like",
    ),
    Study(LIKE[:1], OPS, modes=("inference", *PASSES[:2]), l2=("warm", "cold"), providers=PEERS),
    Study(
        LIKE[:1],
        ("GCNConv_cached-128", *FOUR),
        ("float32", "bfloat16"),
        providers=("stock", "ours", "linears"),
    ),
    Study((*LIKE[:3], "rmat:17:16"), ("structure",), files=CUDA_FILES),
    Study(
        ("mesh:200000", "bipartite:200000:100000:8", "molecules:10000"),
        (*EDGES, "transformer-4x32"),
        modes=(STEP,),
        without=SLOW,
    ),
    Study(("sampled:169343:2300000:1024",), FOUR, modes=("host", STEP), without=SLOW),
    Study(("planted:169343:2300000",), TRAIN),
    Study((), ("train_loader",), files=("tolokers",)),
)
WIDTHS, SHAPES = (64, 128, 256, 512), ("2x64", "8x32", "8x128")


def paper(*graphs: str) -> tuple[Study, ...]:
    """Returns the configurations of the paper on some graphs."""
    wide = tuple(f"{base}-{f}" for base in ("GCNConv", "SAGEConv_max") for f in WIDTHS)
    heads = tuple(f"{base}-{s}" for base in ("GATv2Conv", "TransformerConv") for s in SHAPES)
    return (Study(graphs, (*wide, *heads)),)


def scaling(nodes: int, degree: int, most: int) -> tuple[Study, ...]:
    """Returns studies of the number of edges, skew, hubs and shapes; others stay the same."""
    edges = nodes * degree
    counts = tuple(edges * 2**i // 8 for i in range(8) if edges * 2**i // 8 <= most)
    sizes = tuple(f"power_law:{n // degree}:{n}" for n in counts)
    skew = tuple(f"power_law:{nodes}:{edges}:{e}" for e in (2.05, 2.2, 2.5, 3.0, 4.0, 8.0))
    hubs = tuple(f"hub:{nodes}:{edges}:{edges * part // 100}" for part in (0, 1, 10, 50))
    shapes = ("1x128", "2x64", "4x32", "8x16", "16x8", "8x8", "8x32", "1x47")
    attention = tuple(f"{base}-{s}" for base in ("gatv2", "transformer") for s in shapes)
    wide = tuple(f"{base}-{f}" for base in ("spmm", "max") for f in (16, 32, 47, 64, 128, 256, 512))
    return (
        Study(sizes, FOUR, modes=(STEP,), providers=("stock", "ours")),
        Study((*skew, *hubs), OPS, modes=PASSES[:2], providers=("stock", "ours")),
        Study(skew[2:3], (*attention, *wide), ("float32", "bfloat16"), PASSES[:2]),
    )


QUICK = (
    Study(("power_law:300:3000",), ("GCNConv-16",)),
    Study(
        ("power_law:300:3000",),
        ("spmm-16", "max-16", "GATv2Conv-2x8", "transformer-2x8", "structure"),
        modes=(STEP,),
        without=("torch.compile",),
    ),
    Study(("planted:400:4000",), ("train_GCN",)),
    Study((NONE,), ("copy",)),
)
_LARGE = Study(
    ("power_law:500000:10000000",),
    ("SAGEConv_max-128", "GATv2Conv-4x32", "TransformerConv-4x32"),
    modes=(STEP,),
    providers=("ours",),
    gate_on="power_law:5000:100000",
)
PRESETS: dict[str, dict[str, tuple[Study, ...]]] = {
    "main": {"cpu": CPU, "cuda": CUDA},
    "quick": dict.fromkeys(("cpu", "cuda"), QUICK),
    "layers": {
        "cpu": (
            Study(("power_law:20000:400000",), tuple(f"{n}-128" for n in LAYERS), modes=(STEP,)),
            Study(("power_law:20000:400000",), ("GATConv-4x32",), modes=(STEP,)),
        ),
        "cuda": (Study(("arxiv-like",), tuple(f"{n}-128" for n in LAYERS), modes=(STEP,)),),
    },
    "memory": dict.fromkeys(
        ("cpu", "cuda"), (Study(("power_law:100000:2000000",), FOUR, modes=(STEP,)),)
    ),
    "large": dict.fromkeys(("cpu", "cuda"), (_LARGE,)),
    "scaling": {
        "cpu": scaling(20_000, 20, 1_000_000),
        "cuda": scaling(200_000, 20, 70_000_000),
    },
    "paper": {
        "cpu": paper("power_law:20000:400000"),
        "cuda": paper("arxiv-like", "tolokers-like", "road-like"),
    },
}
