"""torch.compile(model, backend="fx_fuser"): matched subgraphs become one fused CUDA kernel each."""
