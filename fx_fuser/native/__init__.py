"""Kernels as binaries: compilers, the cache on disk, the shim, loading and launching."""
