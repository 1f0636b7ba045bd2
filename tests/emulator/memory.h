// Guarded memory for kernels' tensors, between forbidden pages.
#pragma once

#include <cstddef>
#include <string>

namespace emulator {

constexpr unsigned char kNobodys = 0xFF;  // uninitialised bytes: a NaN in every float type

enum class Guard { kBehind, kAhead };  // on which side the forbidden page is adjacent

// Memory at `misalignment` bytes after a multiple of 16, filled with kNobodys.
void* allocate(size_t bytes, size_t misalignment = 0, Guard guard = Guard::kBehind);

// Frees all of it. Reports writes next to an allocation that did not hit a forbidden page.
std::string release_all();

// "3 bytes behind an allocation of 128 bytes", or that no allocation is near.
std::string describe(const void* address);

}  // namespace emulator
