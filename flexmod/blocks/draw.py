"""Block maps as text, for terminals."""

from __future__ import annotations

from torch import Tensor

from flexmod.blocks.runs import EMPTY, FULL

GLYPHS = {"empty": " ", "partial": "░", "full": "█"}


def draw_tiles(tiles: Tensor, max_rows: int = 32, max_columns: int = 64) -> str:
    """Kinds [query blocks, key blocks] as lines: blank empty, light partial, solid full.

    A larger map is drawn coarser: a cell is blank if all of its blocks are empty, solid if all
    are full, else light.
    """
    rows, columns = tiles.shape
    step_q, step_kv = -(-rows // max_rows) or 1, -(-columns // max_columns) or 1
    lines = []
    for top in range(0, rows, step_q):
        band = tiles[top : top + step_q]
        cells = [band[:, left : left + step_kv] for left in range(0, columns, step_kv)]
        lines.append("".join(_glyph(cell) for cell in cells))
    return "\n".join(lines)


def _glyph(cell: Tensor) -> str:
    if bool((cell == EMPTY).all()):
        return GLYPHS["empty"]
    return GLYPHS["full" if bool((cell == FULL).all()) else "partial"]
