"""Which pass over Inductor's graph may replace a convolution that is no site. For reports."""

from __future__ import annotations

from fx_fuser.anchors import ANCHORS
from fx_fuser.graph.read.nodes import meta_tensor
from fx_fuser.graph.read.sites import Site
from fx_fuser.kernels import grouped, pixels
from fx_fuser.kernels.depthwise import training
from fx_fuser.native import load
from fx_fuser.options import Options
from fx_fuser.passes.convolution import DTYPES, may_run


def later(site: Site, options: Options) -> str:
    """What a pass then times at this convolution, as the end of a reason; empty if none does."""
    tensors = [meta_tensor(n) for n in (site.nodes[0], *map(site.operands.get, ("x", "weight")))]  # type: ignore[arg-type]
    if None in tensors or not may_run(options):
        return ""
    z, x, weight = tensors
    assert z is not None and x is not None and weight is not None
    if z.dtype not in DTYPES or not all(isinstance(size, int) for size in weight.shape):
        return ""
    config = ANCHORS[site.kind].config(site)
    outputs, inputs, *window = weight.shape
    groups, stride = config["groups"], [*config["stride"]]
    is_alike = stride[0] == stride[1]
    if inputs == 1 and groups == outputs:
        takes = is_alike and training.takes(window, stride[0], outputs, z.dtype)
        kind = "depthwise convolutions"
    elif groups > 1:
        takes = grouped.takes(inputs, outputs // groups, groups)
        kind = "grouped convolutions"
    else:
        is_normalised = bool(site.attrs.get("training"))
        takes = is_normalised and (window, stride) == ([1, 1], [1, 1])
        takes = takes and pixels.takes(inputs, outputs)
        takes = takes and load.runs_on(pixels.spec_of(z.dtype), z.device)
        kind = "1 x 1 convolutions with the statistics of their result"
    return f"; a later pass times fx_fuser's kernels for {kind}" if takes else ""
