"""fp32 attention that torch computes as matmul, softmax and matmul → torch's fused attention."""
