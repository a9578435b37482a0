"""Maps to look at: as text, as a matplotlib figure, as SVG in a notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from flexmod.blocks.draw import coarser, draw_tiles
from flexmod.blocks.runs import EMPTY, FULL, PARTIAL

if TYPE_CHECKING:
    from flexmod.blocks.block_mask import BlockMask

NAMES = {EMPTY: "empty", PARTIAL: "partial", FULL: "full"}
COLOURS = {EMPTY: "#f4f1ea", PARTIAL: "#e0a458", FULL: "#2f4858"}
_SVG_CELLS, _SVG_SIDE = 64, 256  # cells a side at most; pixels of the longer side
_TOKENS_SHOWN = 512  # the token-level mask is drawn over the blocks of maps up to this length


def describe(mask: BlockMask) -> str:
    """Numbers and a picture: what print(mask) shows."""
    empty, partial, full = mask.counts()
    return (
        f"BlockMask(shape={mask.shape}, block_size={mask.block_size}, {empty} empty, "
        f"{partial} partial, {full} full, sparsity={mask.sparsity():.2f}%)\n{to_string(mask)}"
    )


def to_string(mask: BlockMask, grid_size: int | tuple[int, int] = 20, limit: int = 4) -> str:
    """Pictures of the first `limit` planes, at most grid_size rows and columns each."""
    size = (grid_size, grid_size) if isinstance(grid_size, int) else grid_size
    tiles = mask.tiles().flatten(0, 1)
    planes = [draw_tiles(plane, *size) for plane in tiles[:limit]]
    more = [f"... {len(tiles) - limit} more"] if len(tiles) > limit else []
    return "\n\n".join(planes + more)


def plot(mask: BlockMask, b: int = 0, h: int = 0, ax: Any = None) -> Any:
    """Draw one plane with matplotlib: empty, partial and full blocks in three colours.

    Maps of up to 512 tokens show their visible tokens as dots.

    Args:
        b, h: which plane.
        ax: matplotlib axes to draw on; default: new ones.

    Returns:
        The axes. Saving or showing the figure is up to the caller.
    """
    import matplotlib.pyplot as plt
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    plane = mask[b, h]
    if ax is None:
        _, ax = plt.subplots(figsize=(5, 5), layout="constrained")
    q_len, kv_len = plane.shape[2:]
    high, wide = plane.block_size
    tiles = plane.tiles()[0, 0].cpu()
    edges = (0, tiles.shape[1] * wide, tiles.shape[0] * high, 0)
    colours = ListedColormap([COLOURS[kind] for kind in NAMES])
    ax.imshow(tiles.numpy(), cmap=colours, vmin=0, vmax=2, extent=edges, interpolation="nearest")
    if 0 < max(q_len, kv_len) <= _TOKENS_SHOWN:
        q, kv = (x.numpy() for x in plane.dense()[0, 0].cpu().nonzero(as_tuple=True))
        area = (220 / max(q_len, kv_len)) ** 2 / 4
        ax.scatter(kv + 0.5, q + 0.5, s=area, marker="s", linewidths=0, color="black", alpha=0.35)
    ax.set(xlim=(0, kv_len), ylim=(q_len, 0), xlabel="kv_idx", ylabel="q_idx", aspect="equal")
    ax.set_title(f"{plane.sparsity():.1f} % of blocks empty", fontsize="medium")
    ax.legend(
        handles=[Patch(color=COLOURS[kind], label=name) for kind, name in NAMES.items()],
        loc="upper right", fontsize="small",
    )  # fmt: skip
    return ax


def to_html(mask: BlockMask, limit: int = 4) -> str:
    """The first `limit` planes as inline SVG, for notebooks."""
    empty, partial, full = mask.counts()
    caption = (
        f"BlockMask {tuple(mask.shape)}, blocks of {tuple(mask.block_size)}: {empty} empty, "
        f"{partial} partial, {full} full"
    )
    tiles = mask.tiles().flatten(0, 1)
    pictures = "".join(_svg(plane) for plane in tiles[:limit])
    more = f"<p>{len(tiles) - limit} more planes</p>" if len(tiles) > limit else ""
    return f"<figure><figcaption>{caption}</figcaption>{pictures}{more}</figure>"


def _svg(tiles: torch.Tensor) -> str:
    """One plane: a rectangle for each run of cells of one kind in a row."""
    cells = coarser(tiles, _SVG_CELLS, _SVG_CELLS).tolist() if tiles.numel() else []
    rows, columns = len(cells), len(cells[0]) if cells else 0
    scale = _SVG_SIDE / max(rows, columns, 1)
    shapes = []
    for y, row in enumerate(cells):
        start = 0
        for x in range(1, columns + 1):
            if x == columns or row[x] != row[start]:
                if row[start] != EMPTY:
                    shapes.append(
                        f'<rect x="{start}" y="{y}" width="{x - start}" height="1" '
                        f'fill="{COLOURS[row[start]]}"/>'
                    )
                start = x
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {columns} {rows}" '
        f'width="{columns * scale:.0f}" height="{rows * scale:.0f}" shape-rendering="crispEdges" '
        f'style="background:{COLOURS[EMPTY]};margin:4px">{"".join(shapes)}</svg>'
    )
