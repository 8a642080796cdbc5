r"""Dropout masks from a counter, so that no mask is ever stored.

The generator is Philox-4x32-10 of the `"Parallel Random Numbers: As Easy as 1, 2, 3"
<https://doi.org/10.1145/2063384.2063405>`_ paper: ten rounds of multiplications turn a counter of
128 bits and a key of 64 bits into four words. The key is the seed; the counter is the position of
the edge and a quarter of the head, whose remainder picks the word.
"""

import torch
from torch import Tensor

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
INCREMENTS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
_WORD = 0xFFFFFFFF


def draw_seed(device: torch.device) -> Tensor:
    """Draws a seed, of shape [1] and dtype int64, from PyTorch's generator of a device."""
    return torch.empty(1, dtype=torch.int64, device=device).random_()


def threshold(p: float) -> int:
    """Returns the word below which a number is dropped with probability :obj:`p`."""
    return min(round(p * 2**32), 2**32)


def keep_scale(p: float) -> float:
    """Returns the factor of the numbers that are kept."""
    return 0.0 if p >= 1 else 1 / (1 - p)


def words(counter: Tensor, block: Tensor, seed: Tensor) -> Tensor:
    r"""Returns four random words for each counter.

    Args:
        counter (torch.Tensor): The low 64 bits of the counters, of shape :obj:`[M]`.
        block (torch.Tensor): The next 32 bits of the counters, of shape :obj:`[M]`.
        seed (torch.Tensor): The key of 64 bits, of shape :obj:`[1]`.

    Returns:
        torch.Tensor: Words in :obj:`[0, 2**32)` of shape :obj:`[M, 4]` and dtype int64.
    """
    c0, c1 = counter & _WORD, (counter >> 32) & _WORD
    c2, c3 = block & _WORD, torch.zeros_like(block)
    key0, key1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(ROUNDS):
        high0, low0 = _multiply(c0, MULTIPLIERS[0])
        high1, low1 = _multiply(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0
        key0, key1 = (key0 + INCREMENTS[0]) & _WORD, (key1 + INCREMENTS[1]) & _WORD
    return torch.stack([c0, c1, c2, c3], dim=1)


def mask(num_positions: int, heads: int, p: float, seed: Tensor, dtype: torch.dtype) -> Tensor:
    r"""Returns what attention weights are multiplied by: zero, or one over the share kept.

    Args:
        num_positions (int): The number :obj:`M` of positions of edges.
        heads (int): The number :obj:`H` of heads.
        p (float): The probability of a zero.
        seed (torch.Tensor): The seed, of shape :obj:`[1]`.
        dtype (torch.dtype): The dtype of the result.

    Returns:
        torch.Tensor: Factors of shape :obj:`[M, H]`.
    """
    blocks = (heads + 3) // 4
    position = torch.arange(num_positions, device=seed.device).repeat_interleave(blocks)
    block = torch.arange(blocks, device=seed.device).repeat(num_positions)
    drawn = words(position, block, seed).view(num_positions, 4 * blocks)[:, :heads]
    return (drawn >= threshold(p)).to(dtype) * keep_scale(p)


def _multiply(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """Returns the high and the low word of the products of words."""
    low, middle = a * (b & 0xFFFF), a * (b >> 16)
    return (middle + (low >> 16)) >> 16, (low + ((middle & 0xFFFF) << 16)) & _WORD
