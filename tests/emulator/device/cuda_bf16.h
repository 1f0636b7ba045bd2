// One header defines both fp16 and bf16 here.
#pragma once

#include <cuda_fp16.h>
