"""One line on a terminal that says what is going on."""

from __future__ import annotations

import sys

_WIDTH = 24  # characters of a bar


class Progress:
    """A line on a terminal's stderr, written over by the next; nothing where it is no terminal."""

    def show(self, text: str, done: float | None = None) -> None:
        """Replace the line; an empty text clears it. `done`, in [0, 1], draws a bar before it."""
        if not sys.stderr.isatty():
            return
        if done is not None:
            filled = round(min(max(done, 0.0), 1.0) * _WIDTH)
            text = f"{'█' * filled}{'░' * (_WIDTH - filled)} {100 * done:3.0f} % {text}"
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
