"""Which library sums rows on a GPU: kernels of this package, or cuSPARSE."""

from torch import Tensor

from pyg_ioaware.engines import NOTES
from pyg_ioaware.engines.cuda import cusparse
from pyg_ioaware.graph.csr import CSR

_WHY = {
    "auto": "the faster one wherever both were measured",
    "kernel": "as was asked for",
    "cusparse": "as was asked for",
}
_preferred = "auto"


def preferred_spmm(library: str | None = None) -> str:
    r"""Sets what sums and means on GPUs are computed by, for all threads, and returns it.

    :obj:`"auto"` takes what is faster, and repeats every bit from run to run: on an H200 that was
    the kernel of this package on every graph, width and dtype that was measured.
    :obj:`"cusparse"` takes NVIDIA's cuSPARSE wherever it has a form for the call, with descriptors
    and workspace kept per structure; its algorithm repeats its bits only under
    :meth:`torch.use_deterministic_algorithms`. It keeps one number per edge beside the structure.
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
