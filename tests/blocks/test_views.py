"""Maps to look at: figures, SVG and numbers that agree with the map."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest
import torch

import flexmod
from flexmod import masks
from flexmod.blocks.views import COLOURS

CAUSAL = flexmod.create_block_mask(masks.causal(), None, 5, 64, 96, "cpu", BLOCK_SIZE=16)


def test_svg_draws_each_live_block_once():
    html = CAUSAL[:, 0]._repr_html_()
    (picture,) = re.findall(r"<svg.*?</svg>", html)
    drawn = torch.zeros(4, 6, dtype=torch.int8)
    for rect in ElementTree.fromstring(picture):
        at = {name: int(rect.get(name)) for name in ("x", "y", "width", "height")}
        kind = next(k for k, colour in COLOURS.items() if colour == rect.get("fill"))
        drawn[at["y"] : at["y"] + at["height"], at["x"] : at["x"] + at["width"]] += kind
    assert torch.equal(drawn, CAUSAL.tiles()[0, 0])


def test_html_shows_a_few_planes_and_the_counts():
    html = CAUSAL._repr_html_()
    assert html.count("<svg") == 4 and "1 more planes" in html
    empty, partial, full = CAUSAL.counts()
    assert f"{empty} empty, {partial} partial, {full} full" in html


@pytest.mark.parametrize("length", [0, 5000])
def test_svg_of_no_map_and_of_a_large_one(length):
    made = flexmod.create_block_mask(masks.causal(), None, None, length, length, "cpu", 16)
    shapes = made._repr_html_().count("<rect")
    assert shapes == 0 if not length else 0 < shapes <= 2 * 64


def test_plot_shows_blocks_and_tokens():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ax = CAUSAL.plot(h=3)
    (image,) = ax.get_images()
    assert torch.equal(torch.as_tensor(image.get_array()).long(), CAUSAL.tiles()[0, 3].long())
    tokens = ax.collections[0].get_offsets() - 0.5
    seen = torch.zeros(64, 96, dtype=torch.bool)
    seen[tokens[:, 1].astype(int), tokens[:, 0].astype(int)] = True
    assert torch.equal(seen, CAUSAL.dense()[0, 3])
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["empty", "partial", "full"]
    again = CAUSAL.plot(ax=ax)
    assert again is ax
    plt.close(ax.figure)


def test_percentages():
    assert CAUSAL.sparsity() == pytest.approx(100 * CAUSAL.counts()[0] / (5 * 24))
    assert CAUSAL.density() == pytest.approx(100 * float(CAUSAL.dense().double().mean()))
    million = flexmod.create_block_mask(masks.sliding_window(1000), None, None, 2**20, 2**20, "cpu")
    keys = 1000 * 2**20 - 1000 * 999 / 2
    assert million.density() == pytest.approx(100 * keys / 2**40)
