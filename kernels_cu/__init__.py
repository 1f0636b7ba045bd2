"""CUDA sources, shipped as package data: `fx_fuser.build` compiles them."""
