"""CUDA sources, shipped as package data: `fx_fuser.native.binaries` compiles them."""
