// Vectors of tensor elements, held in registers as the 32-bit words they are loaded in.
//
// In an array of 16-bit elements, each element would have its own register if another path loads
// them one by one, and ptxas would wait for a vector load at once in order to unpack it.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "common/convert.cuh"

namespace fx_fuser {

template <int kBytes>
using UnsignedOf = std::conditional_t<kBytes % 4 == 0, uint32_t,
                                      std::conditional_t<kBytes % 2 == 0, uint16_t, uint8_t>>;

template <class T, int kWidth>
struct alignas(kWidth * sizeof(T) < 16 ? kWidth * sizeof(T) : 16) Packed {
  static constexpr bool kIsNarrow = sizeof(T) < 4;
  using Word = std::conditional_t<kIsNarrow, UnsignedOf<kWidth * sizeof(T)>, T>;
  using Bits = std::conditional_t<kIsNarrow, UnsignedOf<sizeof(T)>, T>;
  static constexpr int kInWord = sizeof(Word) / sizeof(T);

  Word word[kWidth / kInWord];

  __host__ __device__ __forceinline__ T operator[](int e) const {
    if constexpr (kIsNarrow) {
      const Bits bits = static_cast<Bits>(word[e / kInWord] >> (e % kInWord * 8 * sizeof(T)));
      T element;
      memcpy(&element, &bits, sizeof(T));
      return element;
    } else {
      return word[e];
    }
  }

  // Element e becomes element_at(e).
  template <class ElementAt>
  __host__ __device__ __forceinline__ void assign(ElementAt element_at) {
#pragma unroll
    for (int w = 0; w < kWidth / kInWord; ++w) {
      if constexpr (kIsNarrow) {
        Word packed = 0;
#pragma unroll
        for (int i = 0; i < kInWord; ++i) {
          const T element = element_at(w * kInWord + i);
          Bits bits;
          memcpy(&bits, &element, sizeof(T));
          packed |= static_cast<Word>(static_cast<Word>(bits) << (i * 8 * sizeof(T)));
        }
        word[w] = packed;
      } else {
        word[w] = element_at(w);
      }
    }
  }
};

// Rounds to T, two elements per instruction where possible.
template <class T, int kWidth>
__device__ __forceinline__ Packed<T, kWidth> pack(const float (&value)[kWidth]) {
  Packed<T, kWidth> packed;
  if constexpr (sizeof(T) == 2 && kWidth % 2 == 0) {
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) {
      const Vec<T, 2> pair = convert_pair<T>(value[2 * i], value[2 * i + 1]);
      packed.word[i] = reinterpret_cast<const uint32_t&>(pair);
    }
  } else {
    packed.assign([&](int e) { return convert<T>(value[e]); });
  }
  return packed;
}

// A tuple with one vector per operand.
template <int kOperand, class Vector>
struct VectorSlot {
  Vector vector;
};

template <template <class, int> class Vector, class Operands, int kWidth, class... T>
struct VectorTuple;

template <template <class, int> class Vector, size_t... kOperand, int kWidth, class... T>
struct VectorTuple<Vector, std::index_sequence<kOperand...>, kWidth, T...>
    : VectorSlot<static_cast<int>(kOperand), Vector<T, kWidth>>... {};

template <class Operands, int kWidth, class... T>
using PackedVectors = VectorTuple<Packed, Operands, kWidth, T...>;

template <int kOperand, class Vector>
__device__ __forceinline__ Vector& vector_of(VectorSlot<kOperand, Vector>& slot) {
  return slot.vector;
}

}  // namespace fx_fuser
