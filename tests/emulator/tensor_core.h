// The tensor core's arithmetic, for mma in tensor_core.cpp and wgmma in warpgroup.cpp. In both, a
// warp has 16 rows.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cuda_fp16.h"
#include "machine.h"

namespace emulator {

inline constexpr uint32_t kWholeWarp = 0xFFFFFFFF;

// The values of all 16-bit patterns: converting each element anew would be too slow.
inline std::vector<float> table_of(float (*value)(uint16_t)) {
  std::vector<float> table(1 << 16);
  for (uint32_t bits = 0; bits < table.size(); ++bits) {
    table[bits] = value(static_cast<uint16_t>(bits));
  }
  return table;
}
inline const std::vector<float> kHalves = table_of(half_to_float);
inline const std::vector<float> kBfloat16s = table_of(bfloat16_to_float);

template <Element kElement>
inline constexpr int kElementsOfWord = kElement == Element::kTf32 ? 1 : 2;

// Element e of a word. Of a TF32 element the tensor core reads 19 bits.
template <Element kElement>
float element_of(uint32_t word, int e) {
  if constexpr (kElement == Element::kTf32) {
    const uint32_t bits = word & 0xFFFFE000;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
  } else {
    return (kElement == Element::kHalf ? kHalves : kBfloat16s)[word >> (16 * e) & 0xFFFF];
  }
}

// Rounds toward zero, as the tensor core does its sums.
inline float truncated(double sum) {
  const auto nearest = static_cast<float>(sum);
  if (std::isfinite(nearest) && std::fabs(static_cast<double>(nearest)) > std::fabs(sum)) {
    return std::nextafter(nearest, 0.0f);
  }
  return nearest;
}

// Unpacks a lane's words of the first operand: word 2s + r belongs to row lane / 4 + 8r.
template <Element kElement, int kK>
void take_rows(int lane, const uint32_t* word, double (&a)[16][kK]) {
  constexpr int kElements = kElementsOfWord<kElement>;
  for (int s = 0; s < kK / (4 * kElements); ++s) {
    for (int e = 0; e < kElements; ++e) {
      const int k = 4 * kElements * s + kElements * (lane % 4) + e;
      for (int r = 0; r < 2; ++r) a[lane / 4 + 8 * r][k] = element_of<kElement>(word[2 * s + r], e);
    }
  }
}

// The row and column of a lane's sum in register i.
struct PlaceOfSum {
  int row;
  int column;

  static PlaceOfSum of(int lane, int i) {
    return {lane / 4 + i / 2 % 2 * 8, i / 4 * 8 + lane % 4 * 2 + i % 2};
  }
};

template <int kK, int kColumns>
void add_products(const double (&a)[16][kK], const double (&b)[kK][kColumns],
                  double (&sum)[16][kColumns]) {
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < kK; ++k) {
      for (int column = 0; column < kColumns; ++column)
        sum[row][column] += a[row][k] * b[k][column];
    }
  }
}

}  // namespace emulator
