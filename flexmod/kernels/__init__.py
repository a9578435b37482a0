"""Engines: what runs an attention call, how kernels are built and kept, and who is chosen."""
