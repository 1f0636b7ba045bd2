MODES = [("kNone", 0), ("kMoments", 0), ("kMoments", 1), ("kGradient", 0), ("kJoined", 0)]
SHAPES_OF = [range(4), range(7), range(4), range(7), range(4, 7)]
def text(mode, shapes=range(4), T="__nv_bfloat16", emulated=False):
    sink, load = MODES[mode]
    arg = "const fx_fuser::PixelsPointer args" if emulated else "const __grid_constant__ fx_fuser::PixelsArgs args"
    at = "*args.args" if emulated else "args"
    carg = "const fx_fuser::PixelsCombinePointer args" if emulated else "const __grid_constant__ fx_fuser::PixelsCombineArgs args"
    t = '#include "spike/pixels_sm90.cuh"\n'
    if emulated:
        t += "namespace fx_fuser { struct PixelsPointer { const PixelsArgs* args; const void* unused[7]; }; struct PixelsCombinePointer { const PixelsCombineArgs* args; const void* unused[7]; }; }\n"
    for s in shapes:
        t += f'extern "C" __global__ void __launch_bounds__(fx_fuser::kPixelsThreads, 1) fx_fuser_pixels_{s}({arg}) {{ fx_fuser::pixels::run<{s}, {T}, fx_fuser::pixels::Sink::{sink}, {str(bool(load)).lower()}>({at}); }}\n'
    if sink != "kNone":
        t += f'extern "C" __global__ void __launch_bounds__(256) fx_fuser_pixels_combine({carg}) {{ fx_fuser::pixels::combine<fx_fuser::pixels::Sink::{sink}>({at}); }}\n'
    return t
def wgrad_text(rows, load, emulated=False):
    import pathlib
    T = "__nv_bfloat16"
    body = pathlib.Path(__file__).with_name("wgrad.cuh").read_text()
    p = "struct P { const fx_fuser::wgrad::Args* a; const void* u[7]; }; struct R { const fx_fuser::wgrad::ReduceArgs* a; const void* u[7]; };\n"
    arg = "const P args" if emulated else "const __grid_constant__ fx_fuser::wgrad::Args args"
    rarg = "const R args" if emulated else "const __grid_constant__ fx_fuser::wgrad::ReduceArgs args"
    at = "*args.a" if emulated else "args"
    return body + (p if emulated else "") + f'extern "C" __global__ void __launch_bounds__(384, 1) wgrad({arg}) {{ fx_fuser::wgrad::run<{T}, {rows}, {str(bool(load)).lower()}>({at}); }}\nextern "C" __global__ void __launch_bounds__(256) wgrad_reduce({rarg}) {{ fx_fuser::wgrad::reduce<{T}>({at}); }}\n'
