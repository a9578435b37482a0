"""The exception tree. Every error a user meets is one of these.

FlexmodError
├── TraceError          (TypeError)              a mod holds something that cannot be traced
├── ArgumentError       (ValueError)             a shape, dtype or option is wrong
│   └── BlockMaskError  (RuntimeError too)       a block mask does not fit, or would be wrong
├── UnsupportedError    (NotImplementedError)    valid elsewhere, not offered here
├── DeviceError         (ValueError, RuntimeError)  tensors live on different devices
├── IndexRangeError     (IndexError)             a mod reads past the end of a captured tensor
└── BackendError        (ValueError, RuntimeError)  the backend asked for cannot serve the call

The second base is the exception that torch raises in the same place, so existing handlers work.
"""

from __future__ import annotations


class FlexmodError(Exception):
    """Base of all errors of this package."""


class TraceError(FlexmodError, TypeError):
    """A mod holds something that cannot be traced; the text names the user's own line."""


class ArgumentError(FlexmodError, ValueError):
    """An argument has a wrong shape, dtype, range or name; the text names the argument."""


class BlockMaskError(ArgumentError, RuntimeError):
    """A block mask does not fit the call, or would give a wrong result if it were used."""


class UnsupportedError(FlexmodError, NotImplementedError):
    """The input is valid, but this package does not serve it."""


class DeviceError(FlexmodError, ValueError, RuntimeError):
    """Tensors of one call live on different devices."""


class IndexRangeError(FlexmodError, IndexError):
    """A mod indexes a captured tensor out of its range at a visible position."""


class BackendError(FlexmodError, ValueError, RuntimeError):
    """The backend asked for cannot serve this call; the text says which limit it met."""
