// Vectors of tensor elements that wait in registers as the words they are loaded in.
//
// As an array of 16-bit elements, each would have a register of its own where another path loads
// them one by one, and ptxas would wait for a vector load at once, to take it apart.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

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

// A tuple of them, one an operand.
template <int kOperand, class T, int kWidth>
struct PackedSlot {
  Packed<T, kWidth> packed;
};

template <class Operands, int kWidth, class... T>
struct PackedVectors;

template <size_t... kOperand, int kWidth, class... T>
struct PackedVectors<std::index_sequence<kOperand...>, kWidth, T...>
    : PackedSlot<static_cast<int>(kOperand), T, kWidth>... {};

template <int kOperand, class T, int kWidth>
__device__ __forceinline__ Packed<T, kWidth>& packed_of(PackedSlot<kOperand, T, kWidth>& slot) {
  return slot.packed;
}

}  // namespace fx_fuser
