"""Block maps as text, for terminals."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import max_pool2d

from flexmod.blocks.runs import EMPTY, FULL, PARTIAL

# A character is about twice as high as it is wide, so it shows two rows: (upper, lower) kinds.
GLYPHS = {
    (EMPTY, EMPTY): " ",
    (PARTIAL, PARTIAL): "▒",
    (FULL, FULL): "█",
    (PARTIAL, FULL): "▓",
    (FULL, PARTIAL): "▓",
    (PARTIAL, EMPTY): "▀",
    (FULL, EMPTY): "▀",
    (EMPTY, PARTIAL): "▄",
    (EMPTY, FULL): "▄",
}
LEGEND = "█ full   ▓ full and partial   ▒ partial   ▀ ▄ half a cell empty   blank: empty, skipped"


def draw_tiles(tiles: Tensor, max_rows: int = 64, max_columns: int = 64) -> str:
    """Kinds [query blocks, key blocks] as lines of half-block characters; see LEGEND.

    At most max_rows rows of cells, two of them a line, and max_columns columns. A larger map is
    drawn coarser: a cell is empty if all of its blocks are, full if all are full, else partial.

    Example:
        >>> import flexmod
        >>> causal = flexmod.create_block_mask(flexmod.masks.causal(), None, None, 1024, 1024)
        >>> draw_tiles(causal.tiles()[0, 0]).splitlines()
        ['▓▄      ', '██▓▄    ', '████▓▄  ', '██████▓▄']
    """
    if not tiles.numel():
        return ""
    cells = coarser(tiles, max_rows, max_columns).tolist()
    if len(cells) % 2:
        cells.append([EMPTY] * len(cells[-1]))
    halves = zip(cells[::2], cells[1::2], strict=True)
    return "\n".join("".join(GLYPHS[pair] for pair in zip(*two, strict=True)) for two in halves)


def coarser(tiles: Tensor, max_rows: int, max_columns: int) -> Tensor:
    """Groups of blocks as one cell each, so that at most max_rows x max_columns remain."""
    rows, columns = tiles.shape
    step = (-(-rows // max_rows), -(-columns // max_columns))
    kinds = tiles.cpu().float()[None]
    high = max_pool2d(kinds, step, ceil_mode=True)[0]
    low = -max_pool2d(-kinds, step, ceil_mode=True)[0]
    return torch.where(low == high, low, PARTIAL).int()
