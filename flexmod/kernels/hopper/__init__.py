"""The `hopper` engine: Gluon kernels for sm_90."""
