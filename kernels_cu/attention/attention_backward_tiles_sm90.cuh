// The split attention's backward: passes, their shared-memory layout and units of work.
#pragma once

#include "attention/attention_backward_args.h"
#include "attention/attention_split_tiles_sm90.cuh"

namespace fx_fuser::attention_backward {

using attention_split::Tiles;
using attention_split::TilesSoFar;
using attention_split::Unit;

enum class Pass {
  kQueries,       // dq
  kKeys,          // dk
  kValues,        // dv
  kKeysAndValues  // both
};

template <int kShape>
struct Shape {
  static constexpr AttentionBackwardShape kOf = kAttentionBackwardShapes[kShape];
  static constexpr AttentionShape kIs = kOf.tiles;
};

template <int kShape, Pass kPass, bool kDropsWeights>
struct Layout : Tiles<Shape<kShape>> {
  using Base = Tiles<Shape<kShape>>;
  using Args = AttentionBackwardArgs;
  static constexpr bool kDrops = kDropsWeights;
  static constexpr bool kHasColumns = kPass != Pass::kQueries;  // tiles are of queries
  static constexpr bool kMultipliesBoth = true;
  static constexpr bool kBeginsEarly = Shape<kShape>::kOf.begins_early();
  static constexpr bool kTellsUnits = kBeginsEarly;
  static constexpr bool kMakesValues = kPass == Pass::kValues || kPass == Pass::kKeysAndValues;
  static constexpr bool kMakesRows = kPass != Pass::kValues;  // dq or dk
  static constexpr bool kBeginsWithBoth = kBeginsEarly && !kMakesValues;
  // A query's weights are exp2(score - lse) times a factor near 1 (RestOfLse). A pass for dv and dk
  // applies it to dO and delta, one for dv to the scale of P's halves; one for dk omits it.
  static constexpr bool kScalesLines = kMakesValues && kMakesRows;
  static constexpr bool kKeepsSecond = Shape<kShape>::kOf.keeps_second(kDrops && kHasColumns);

  struct HiOfSecond {
    typename Base::Rows second_hi;
  };
  struct Nothing {};
  struct LoOfBoth : std::conditional_t<kKeepsSecond, Nothing, HiOfSecond> {
    typename Base::Rows first_lo;
    typename Base::Rows second_lo;
  };
  struct OfTiles : Base::template Pipeline<LoOfBoth> {
    alignas(16) int first_column[Base::kStaged];  // in of_queries
    // If rows are queries, this holds theirs, 64 per warpgroup.
    alignas(16) AttentionOfQuery column[Base::kSlots][Base::kKeys];
    float2 unscale[Base::kConsumers][kAttentionRows];  // per row: of the first, of the second
    int unit_of_warp[4 * Base::kConsumers];            // unit number, to save a register
  };
  // A ring of units as computed by the producer, since divisions are slow.
  struct WithUnits : OfTiles {
    Unit unit[Base::kUnits];
    float factor_of_line[Base::kKeys];  // of the tile of dO that the producer converts
  };
  using Own = std::conditional_t<kBeginsEarly, WithUnits, OfTiles>;
  using Shared = typename Base::template Beside<Own, kDrops>;
  // With dropout, dq's pass keeps more in registers and needs less.
  static_assert(sizeof(Shared) <= Shape<kShape>::kOf.shared_bytes(kDrops));

  static __device__ __forceinline__ Unit unit_at(const Args& args, int index) {
    Unit unit = attention_split::place_at(args, index);
    int end = args.column_count;
    // The longest units come first: the last queries, or the first keys.
    if (!kHasColumns) unit.block = args.blocks - 1 - unit.block;
    unit.first_row = unit.block * Base::kRows;
    unit.head_of_tiles = unit.head / args.heads_of_tiles;
    if (args.is_causal) {
      if (kHasColumns) {
        unit.first_tile = unit.first_row / Base::kKeys;
      } else {
        end = min(end, unit.first_row + Base::kRows);
      }
    }
    unit.tiles = (end + Base::kKeys - 1) / Base::kKeys;
    return unit;
  }
  // Whether tile < unit.tiles, without a register for the latter.
  static __device__ __forceinline__ bool has_tile(const Args& args, const Unit& unit, int tile) {
    const int first = tile * Base::kKeys;
    const bool sees = kHasColumns || !args.is_causal || first < unit.first_row + Base::kRows;
    return first < args.column_count && sees;
  }
  // Publishes a query of a tile to the consumers. Called by a producer thread.
  template <class Beside>
  static __device__ __forceinline__ void tell_query(Beside& shared, int slot, int column,
                                                    const AttentionQuery& query) {
    AttentionOfQuery& told = shared.column[slot][column];
    told = query.of;
    const float factor = attention_split::rest_of_lse(query).factor();
    if constexpr (kScalesLines) {
      told.delta *= factor;
      shared.factor_of_line[column] = factor;
    } else if constexpr (kMakesValues) {
      told.delta = factor * 0x1p15f;  // the scale of P's halves: this pass needs no delta
    }
  }
  template <class Feed>
  static __device__ __forceinline__ int column_of(const Args& args, const Feed& feed) {
    return (feed.batch * args.heads + feed.head) * args.padded + feed.tile * Base::kKeys;
  }
  static __device__ __forceinline__ int lines_of(const Args& args) { return args.column_count; }
  static __device__ __forceinline__ bool has_results(bool second) {
    return second ? kMakesValues : kMakesRows;
  }
  static __device__ __forceinline__ float least_of(bool second) {
    return kHasColumns && second ? attention_split::kLeastGradient : attention_split::kLeastOperand;
  }
  // A tile's products begin at zero, so each tile may have its own scale.
  static constexpr bool kKeepsScale = false;
  static __device__ __forceinline__ float factor_of(bool /*second*/, float scale) {
    return Scale::unscale_of(scale);
  }
};

// If rows are queries: the same for all columns.
struct QueriesOfRows {
  AttentionOfQuery of_row[2];
  __device__ __forceinline__ AttentionOfQuery at(int r, int /*t*/) const { return of_row[r]; }
};
// If columns are queries: this thread's two of eight.
struct QueriesOfColumns {
  float4 both;
  __device__ __forceinline__ AttentionOfQuery at(int /*r*/, int t) const {
    return t == 0 ? AttentionOfQuery{both.x, both.y} : AttentionOfQuery{both.z, both.w};
  }
};

}  // namespace fx_fuser::attention_backward
