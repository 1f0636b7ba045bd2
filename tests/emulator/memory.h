// Memory between pages that nobody may touch, for what kernels read and write.
#pragma once

#include <cstddef>
#include <string>

namespace emulator {

constexpr unsigned char kNobodys = 0xFF;  // bytes that are nobody's yet: a NaN in every float type

enum class Guard { kBehind, kAhead };  // where the forbidden page is that memory touches

// Aligned to 16 bytes, and `misalignment` more; all kNobodys.
void* allocate(size_t bytes, size_t misalignment = 0, Guard guard = Guard::kBehind);

// All of it; says what was written beside an allocation, where no forbidden page was.
std::string release_all();

// "3 bytes behind an allocation of 128", or that it is near none.
std::string describe(const void* address);

}  // namespace emulator
