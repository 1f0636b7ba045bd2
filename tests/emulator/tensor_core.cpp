// What a warp does at once: ldmatrix and mma (PTX ISA, 9.7.14).
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cuda_fp16.h"
#include "machine.h"

namespace emulator {
namespace {

constexpr uint32_t kWholeWarp = 0xFFFFFFFF;

// ---- ldmatrix -----------------------------------------------------------------------------------

struct Matrices {
  bool reads;
  uint32_t* word;
  const uint16_t* row;
  Where where;
};

template <bool kTransposed>
void load_for_warp(void* const (&data)[32], uint32_t /*mask*/) {
  const auto of = [&](int lane) { return static_cast<const Matrices*>(data[lane]); };
  for (int lane = 0; lane < 32; ++lane) {
    if (of(lane)->reads != of(0)->reads) fail("ldmatrix by a part of a warp", of(lane)->where);
  }
  if (!of(0)->reads) return;
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i) {
      uint32_t half[2];
      for (int t = 0; t < 2; ++t) {
        const int row = kTransposed ? 2 * (lane % 4) + t : lane / 4;
        const int column = kTransposed ? lane / 4 : 2 * (lane % 4) + t;
        half[t] = of(8 * i + row)->row[column];
      }
      of(lane)->word[i] = half[0] | half[1] << 16;
    }
  }
}

// ---- mma ----------------------------------------------------------------------------------------

// Of all 16 bits; a conversion is too slow to be made for each of them.
std::vector<float> table_of(float (*value)(uint16_t)) {
  std::vector<float> table(1 << 16);
  for (uint32_t bits = 0; bits < table.size(); ++bits) {
    table[bits] = value(static_cast<uint16_t>(bits));
  }
  return table;
}
const std::vector<float> kHalves = table_of(half_to_float);
const std::vector<float> kBfloat16s = table_of(bfloat16_to_float);

// Element e of a register. The tensor core reads 19 bits of one of TF32.
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

// Toward zero, as the tensor core's sums are.
float truncated(double sum) {
  const auto nearest = static_cast<float>(sum);
  if (std::isfinite(nearest) && std::fabs(static_cast<double>(nearest)) > std::fabs(sum)) {
    return std::nextafter(nearest, 0.0f);
  }
  return nearest;
}

struct Products {
  float* d;
  const uint32_t* a;
  const uint32_t* b;
  const float* c;
};

// kSteps of registers along k: each is eight of 16 bits, or four of TF32.
template <Element kElement, int kSteps>
void multiply_for_warp(void* const (&data)[32], uint32_t /*mask*/) {
  constexpr int kElements = kElement == Element::kTf32 ? 1 : 2;  // of a register
  constexpr int kK = 4 * kElements * kSteps;
  double a[16][kK];
  double b[kK][8];
  double sum[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const auto& mine = *static_cast<const Products*>(data[lane]);
    for (int s = 0; s < kSteps; ++s) {
      for (int e = 0; e < kElements; ++e) {
        const int k = 4 * kElements * s + kElements * (lane % 4) + e;
        a[lane / 4][k] = element_of<kElement>(mine.a[2 * s], e);
        a[lane / 4 + 8][k] = element_of<kElement>(mine.a[2 * s + 1], e);
        b[k][lane / 4] = element_of<kElement>(mine.b[s], e);
      }
    }
    for (int i = 0; i < 4; ++i) sum[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2] = mine.c[i];
  }
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < kK; ++k) {
      for (int column = 0; column < 8; ++column) sum[row][column] += a[row][k] * b[k][column];
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    const auto& mine = *static_cast<const Products*>(data[lane]);
    for (int i = 0; i < 4; ++i) {
      mine.d[i] = truncated(sum[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2]);
    }
  }
}

}  // namespace

void load_matrices(bool reads, bool transposed, uint32_t (&word)[4], uint32_t row, Where where) {
  const void* at = reads ? at_address(row, 16, where) : nullptr;
  Matrices mine{reads, word, static_cast<const uint16_t*>(at), where};
  collect("ldmatrix", kWholeWarp, &mine, transposed ? load_for_warp<true> : load_for_warp<false>,
          where);
}

void multiply(Element element, int steps, float (&d)[4], const uint32_t* a, const uint32_t* b,
              const float (&c)[4], Where where) {
  Products mine{d, a, b, c};
  Execute execute = nullptr;
  if (element == Element::kTf32) {
    execute = multiply_for_warp<Element::kTf32, 2>;
  } else if (element == Element::kHalf) {
    execute =
        steps == 2 ? multiply_for_warp<Element::kHalf, 2> : multiply_for_warp<Element::kHalf, 1>;
  } else {
    execute = steps == 2 ? multiply_for_warp<Element::kBfloat16, 2>
                         : multiply_for_warp<Element::kBfloat16, 1>;
  }
  collect("mma", kWholeWarp, &mine, execute, where);
}

}  // namespace emulator
