"""fp32 attention that torch computes as matmul, softmax and matmul → one call of its fused one."""
