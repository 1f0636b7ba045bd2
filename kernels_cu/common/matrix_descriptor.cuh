// wgmma's shared-memory matrix descriptor. (PTX ISA 9.7.15.5)
#pragma once

#include <cstdint>

namespace fx_fuser::ptx {

// Descriptor of a K-major operand in rows of 128 bytes with the 128-byte swizzle. 8 rows are 1024
// bytes, to which `address` is aligned (9.7.15.5.1). Add 2 to advance by 16 elements of 16 bits.
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t address) {
  constexpr uint64_t kLeadingOffset = 1;  // ignored where a row is one swizzle span
  constexpr uint64_t kStrideOffset = 1024 / 16;
  constexpr uint64_t kSwizzle128 = 1;
  return (address & 0x3FFFF) >> 4 | kLeadingOffset << 16 | kStrideOffset << 32 | kSwizzle128 << 62;
}

// Descriptor of a transposed (MN-major) operand in lines of 128 bytes with the 128-byte swizzle: a
// line is 64 adjacent rows or columns of one k. Eight k are 1024 bytes, to which `address` is
// aligned; the next 64 rows or columns are `span` bytes further. Add 128 to advance by 16 k.
// (CUTLASS, make_gmma_desc of Major::MN, B128: ((8,n),(8,k)):((1,LBO),(8,SBO)))
__device__ __forceinline__ uint64_t transposed_descriptor(uint32_t address, uint32_t span) {
  constexpr uint64_t kStrideOffset = 1024 / 16;
  constexpr uint64_t kSwizzle128 = 1;
  return (address & 0x3FFFF) >> 4 | uint64_t{span / 16} << 16 | kStrideOffset << 32 |
         kSwizzle128 << 62;
}

}  // namespace fx_fuser::ptx
