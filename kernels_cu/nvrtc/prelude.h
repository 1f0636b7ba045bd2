// What nvcc includes ahead of a source's first line, as far as kernels use it.
#pragma once

#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fc00000)
