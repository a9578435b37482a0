"""Masks that depend on the distance between query and key."""

from __future__ import annotations

from flexmod.masks.arguments import MaskMod, whole


def causal() -> MaskMod:
    """Query i sees keys 0..i, itself included. Rows of 4 tokens see 1, 2, 3, 4 keys.

    Positions are counted from the start of both sequences. If the queries are the last ones of
    a longer key sequence (decoding), write `shift(causal(), q_offset=kv_len - q_len)`.
    """

    def causal(b, h, q_idx, kv_idx):
        return q_idx >= kv_idx

    return causal


def sliding_window(window: int, causal: bool = True) -> MaskMod:
    """Exactly `window` keys a row, the query's own included, where the sequence has them.

    causal=True: keys i-window+1..i, so rows see min(i+1, window) keys: `sliding_window(4)` on
    10 tokens gives 1, 2, 3, 4, 4, 4, 4, 4, 4, 4.
    causal=False: centred, keys i - window//2 .. i + (window-1)//2. An even window has its odd
    key on the left: `sliding_window(4, causal=False)` shows keys i-2..i+1.
    Other conventions: `window` keys beside the query's own is `window_between(window, 0)`;
    |i - j| <= radius is `symmetric_window(radius)`.
    Source: Longformer (2020); causal as in Mistral 7B (2023).
    """
    left, right = reach(whole("window", window), causal)

    def sliding_window(b, h, q_idx, kv_idx):
        return (kv_idx >= q_idx - left) & (kv_idx <= q_idx + right)

    return sliding_window


def reach(window: int, causal: bool) -> tuple[int, int]:
    """Keys to the left and to the right of the query in a window of `window` keys."""
    return (window - 1, 0) if causal else (window // 2, (window - 1) // 2)


def window_between(left: int | None, right: int | None) -> MaskMod:
    """Keys i-left..i+right, both ends and the query included: left + right + 1 keys a row.

    None leaves a side open: `window_between(None, 0)` is causal.
    Example: `window_between(1, 0)` on 4 tokens: rows see 1, 2, 2, 2 keys.
    """
    left = None if left is None else whole("left", left, 0)
    right = None if right is None else whole("right", right, 0)

    def window_between(b, h, q_idx, kv_idx):
        if left is None and right is None:
            return kv_idx * 0 == 0
        if left is None:
            return kv_idx <= q_idx + right
        if right is None:
            return kv_idx >= q_idx - left
        return (kv_idx >= q_idx - left) & (kv_idx <= q_idx + right)

    return window_between


def symmetric_window(radius: int) -> MaskMod:
    """|i - j| <= radius: up to 2*radius + 1 keys a row.

    Example: `symmetric_window(1)` on 4 tokens: rows see 2, 3, 3, 2 keys.
    """
    mod = window_between(whole("radius", radius, 0), radius)
    mod.__name__ = mod.__qualname__ = "symmetric_window"
    return mod


def dilated_window(window: int, dilation: int, causal: bool = True) -> MaskMod:
    """`window` keys a row, `dilation` apart: i, i-dilation, ..., i-(window-1)*dilation.

    dilation=1 is `sliding_window(window, causal)`; causal=False centres in the same way.
    Example: `dilated_window(2, 3)` shows query 7 the keys 4 and 7.
    Source: Longformer (2020), LongNet (2023).
    """
    dilation = whole("dilation", dilation)
    left, right = (side * dilation for side in reach(whole("window", window), causal))

    def dilated_window(b, h, q_idx, kv_idx):
        near = (kv_idx >= q_idx - left) & (kv_idx <= q_idx + right)
        return near & ((q_idx - kv_idx) % dilation == 0)

    return dilated_window


def sink_window(window: int, sinks: int) -> MaskMod:
    """Causal: the last `window` keys (the query's own included) and the first `sinks` keys.

    Example: `sink_window(2, 1)` shows query 5 the keys 0, 4, 5.
    Source: StreamingLLM (2023).
    """
    window, sinks = whole("window", window), whole("sinks", sinks, 0)

    def sink_window(b, h, q_idx, kv_idx):
        return (kv_idx <= q_idx) & ((kv_idx > q_idx - window) | (kv_idx < sinks))

    return sink_window


def strided(stride: int) -> MaskMod:
    """Causal: the last `stride` keys, and every key a multiple of `stride` back.

    Example: `strided(3)` shows query 7 the keys 1, 4, 5, 6, 7.
    Source: both heads of the strided pattern of Sparse Transformers (2019), joined.
    """
    stride = whole("stride", stride)

    def strided(b, h, q_idx, kv_idx):
        recent = kv_idx > q_idx - stride
        return (kv_idx <= q_idx) & (recent | ((q_idx - kv_idx) % stride == 0))

    return strided
