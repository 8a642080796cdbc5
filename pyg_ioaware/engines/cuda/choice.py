"""Which library sums rows on a GPU: kernels of this package, or cuSPARSE."""

from torch import Tensor

from pyg_ioaware.engines import NOTES
from pyg_ioaware.engines.cuda import cusparse
from pyg_ioaware.graph.csr import CSR

_WHY = {
    "auto": "its bits repeat, and it is faster without weights",
    "kernel": "as was asked for",
    "cusparse": "as was asked for",
}
_preferred = "auto"


def preferred_spmm(library: str | None = None) -> str:
    r"""Sets what sums and means on GPUs are computed by, for all threads, and returns it.

    :obj:`"auto"` takes the kernel of this package: it repeats every bit from run to run, and sums
    without weights were faster on an H200 on every graph and dtype that was measured.
    :obj:`"cusparse"` takes NVIDIA's cuSPARSE wherever it has a form for the call, with descriptors,
    workspace and analysis kept per structure, and one number per edge beside it. It repeats its
    bits only under :meth:`torch.use_deterministic_algorithms`, and sums a row of very many edges
    less exactly then.
    :meth:`~pyg_ioaware.explain` tells which was taken, and why.

    Args:
        library (str, optional): :obj:`"auto"`, :obj:`"kernel"` or :obj:`"cusparse"`. If it is
            :obj:`None`, nothing is set. (default: :obj:`None`)

    Returns:
        str: The setting.

    Raises:
        ValueError: If it is none of them.
    """
    global _preferred
    if library is not None:
        if library not in _WHY:
            raise ValueError(f"'library' must be one of {tuple(_WHY)} (got {library!r})")
        _preferred = library
    return _preferred


def uses_cusparse(csr: CSR, x: Tensor, weight: Tensor | None) -> bool:
    r"""Chooses for one product, and notes it for who watches.

    Args:
        csr (CSR): The structure.
        x (torch.Tensor): The rows that are summed.
        weight (torch.Tensor, optional): Weights of shape :obj:`[E, H]`.
    """
    why, chosen = _WHY[_preferred], False
    if _preferred == "cusparse":
        refused = cusparse.why_not(csr, x, weight)
        why, chosen = refused or why, refused is None
    seen = NOTES.get()
    if seen is not None:
        seen[f"sums by {'cuSPARSE' if chosen else 'own kernel'}: {why}"] += 1
    return chosen
