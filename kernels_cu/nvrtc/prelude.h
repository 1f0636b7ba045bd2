// The part that kernels use of what nvcc includes before a source's first line.
#pragma once

#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fc00000)
