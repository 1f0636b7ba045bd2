// Instructions of a whole warp: ldmatrix and mma (PTX ISA, 9.7.14).
#include "tensor_core.h"

#include <cstdint>

#include "machine.h"

namespace emulator {
namespace {

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

struct Products {
  float* d;
  const uint32_t* a;
  const uint32_t* b;
  const float* c;
};

// kSteps: registers along k, each for eight 16-bit elements, or four of TF32.
template <Element kElement, int kSteps>
void multiply_for_warp(void* const (&data)[32], uint32_t /*mask*/) {
  constexpr int kElements = kElementsOfWord<kElement>;
  constexpr int kK = 4 * kElements * kSteps;
  double a[16][kK];
  double b[kK][8];
  double sum[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const auto& mine = *static_cast<const Products*>(data[lane]);
    take_rows<kElement>(lane, mine.a, a);
    for (int s = 0; s < kSteps; ++s) {
      for (int e = 0; e < kElements; ++e) {
        b[4 * kElements * s + kElements * (lane % 4) + e][lane / 4] =
            element_of<kElement>(mine.b[s], e);
      }
    }
    for (int i = 0; i < 4; ++i) {
      const auto [row, column] = PlaceOfSum::of(lane, i);
      sum[row][column] = mine.c[i];
    }
  }
  add_products(a, b, sum);
  for (int lane = 0; lane < 32; ++lane) {
    const auto& mine = *static_cast<const Products*>(data[lane]);
    for (int i = 0; i < 4; ++i) {
      const auto [row, column] = PlaceOfSum::of(lane, i);
      mine.d[i] = truncated(sum[row][column]);
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
