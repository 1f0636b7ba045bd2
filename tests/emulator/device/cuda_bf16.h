// fp16 and bf16 are one header here.
#pragma once

#include <cuda_fp16.h>
