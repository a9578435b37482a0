"""Real text for the demo, and query, key and value made of it.

The documents are source files of Python's own standard library, which lie on every machine. Their
bytes are the tokens; a fixed random embedding with a little context, and fixed random projections,
make query, key and value of them.
"""

from __future__ import annotations

import sysconfig
import zlib
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from flexmod import masks
from flexmod.errors import ArgumentError

HEADS, HEAD_DIM, WIDTH = 4, 64, 128


class Text(NamedTuple):
    """Packed documents: tokens and document ids, both [length] int64; the files they came from."""

    tokens: Tensor
    ids: Tensor
    names: list[str]


def pack_documents(length: int, device: torch.device) -> Text:
    """Files of the standard library one after the other, until `length` tokens are full.

    No document has more than a quarter of the tokens: whole files come first, then the beginnings
    of longer ones. The last document is cut where the tokens end.
    """
    root, longest = Path(sysconfig.get_path("stdlib")), length // 4
    # By checksum of the name: a mix of subjects that is the same on every run.
    files = sorted(root.glob("*.py"), key=lambda path: zlib.crc32(path.name.encode()))
    tokens, lengths, names = bytearray(), [], []
    for path in sorted(files, key=lambda path: path.stat().st_size > longest):
        room = min(longest, length - len(tokens))
        piece = path.read_bytes()[:room]
        if piece:
            tokens += piece
            lengths.append(len(piece))
            names.append(path.name)
    if len(tokens) < length:
        raise ArgumentError(
            f"the standard library in {root} has {len(tokens)} bytes of .py files for "
            f"{length} tokens: choose a smaller --length"
        )
    bytes_ = torch.frombuffer(tokens, dtype=torch.uint8).long()
    return Text(bytes_.to(device), masks.document_ids(lengths, device), names)


def make_inputs(text: Text, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """query, key, value [1, HEADS, length, HEAD_DIM] of the text, the same on every run."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(256, WIDTH, generator=generator)
    project = torch.randn(3, WIDTH, HEADS * HEAD_DIM, generator=generator) / WIDTH**0.5
    token = table[text.tokens.cpu()]  # [length, WIDTH]
    # The three bytes before a byte join it, so that equal bytes in different words differ.
    hidden = torch.zeros_like(token)
    for back, weight in enumerate((0.8, 0.4, 0.3, 0.2)):
        hidden += weight * token.roll(back, 0)
    projected = (hidden @ project).view(3, 1, -1, HEADS, HEAD_DIM).transpose(2, 3)
    query, key, value = projected.contiguous().to(text.ids.device, dtype)
    return query, key, value
