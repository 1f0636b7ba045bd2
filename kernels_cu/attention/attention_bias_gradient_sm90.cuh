// Backward of attention with a bias: the bias's gradient, for sm_90a.
//
// A block has 128 queries and a tile of keys, and iterates over the heads and batches that share
// the bias. It recomputes S and D for each, and sums G in registers in a fixed order. One producer
// thread loads q, dO, k, v and the bias by TMA; two consumer warpgroups have 64 queries each.
#pragma once

#include "attention/attention_bias_weights.cuh"

namespace fx_fuser::attention_bias {

template <class T, int kShape>
struct GradientLayout {
  using Element = T;
  static constexpr BiasShape kOf = kBiasShapes[kShape];
  static constexpr BiasPass kIs = kOf.d_bias;
  static constexpr int kD = kIs.d;
  static constexpr int kColumns = kIs.columns;
  static constexpr int kSlots = kIs.slots;
  static constexpr int kScores = kColumns / 2;
  static constexpr bool kHasColumns = false;
  static constexpr bool kDrops = kIs.drops;
  using Tile = Lines<kD, kColumns>;
  using RowTile = Lines<kD, kAttentionRows>;

  struct Slot {
    RowTile queries[kBiasConsumers];
    RowTile d_out[kBiasConsumers];
    Tile keys;
    Tile values;
    uint8_t of_queries[kBiasOfQueries];
  };
  struct Pipeline {
    Slot slot[kSlots];
    BiasBox bias[kBiasConsumers][kColumns / kBiasBox];
    uint64_t full[kSlots];
    uint64_t empty[kSlots];
    uint64_t bias_full;
    uint64_t bias_empty;
  };
  using Shared = Beside<Pipeline, kDrops, kScores>;
  static_assert(sizeof(Shared) == kOf.bias_shared_bytes());

  static __device__ __forceinline__ void begin(Shared& shared) {
    constexpr int kWarps = 4 * kBiasConsumers;
    const int blocks = static_cast<int>(ptx::cluster_size());
    const auto init = [](uint64_t& barrier, int arrivals) {
      ptx::mbarrier_init(ptx::shared_address(&barrier), arrivals);
    };
    for (uint64_t& one : shared.full) init(one, 1);
    for (uint64_t& one : shared.empty) init(one, kWarps * blocks);
    init(shared.bias_full, 1);
    init(shared.bias_empty, kWarps);
    ptx::fence_mbarrier_init();
  }
};

// A tile of the bias's gradient.
struct GradientUnit {
  int batch;  // of the gradient
  int head;
  int first_row;
  int tile;
  int count;  // of summed heads; 0 if no query sees the tile

  template <int kColumns>
  static __device__ __forceinline__ GradientUnit at(const BiasAttentionArgs& args, int index) {
    GradientUnit unit{};
    int rest = index / args.tiles;
    unit.tile = index - rest * args.tiles;
    const int block = rest % args.blocks;
    rest /= args.blocks;
    unit.batch = rest / args.d_bias_heads;
    unit.head = rest - unit.batch * args.d_bias_heads;
    unit.first_row = block * kBiasRows;
    unit.count = args.batches / args.d_bias_batches * (args.heads / args.d_bias_heads);
    // A cluster's blocks have an even tile of keys and the next one, and must agree.
    const int first = unit.tile - unit.tile % static_cast<int>(ptx::cluster_size());
    if (args.is_causal && first * kColumns >= unit.first_row + kBiasRows) unit.count = 0;
    return unit;
  }
  // The nth summed head.
  __device__ __forceinline__ Unit of(const BiasAttentionArgs& args, int nth) const {
    Unit one{};
    const int heads = args.heads / args.d_bias_heads;
    one.batch = args.d_bias_batches == 1 ? nth / heads : batch;
    one.head = args.d_bias_heads == 1 ? nth % heads : head;
    one.first_row = first_row;
    return one;
  }
};

template <class L>
__device__ __forceinline__ void feed_gradient(const BiasAttentionArgs& args,
                                              typename L::Shared& shared) {
  Ring<L::kSlots> ring{};
  uint32_t bias_phase = 0;
  const Sharing sharing{};  // of q and dO, by the blocks of two tiles of keys
#pragma unroll 1
  for (int index = static_cast<int>(blockIdx.x); index < args.units;
       index += static_cast<int>(gridDim.x)) {
    const auto unit = GradientUnit::at<L::kColumns>(args, index);
    const int key = unit.tile * L::kColumns;
#pragma unroll 1
    for (int nth = 0; nth < unit.count; ++nth) {
      const Unit one = unit.of(args, nth);
      const Bring bring{one.head, one.batch};
      auto& slot = shared.slot[ring.slot()];
      uint64_t& full = shared.full[ring.slot()];
      open(full, shared.empty[ring.slot()], ring.phase(), sizeof(slot));
#pragma unroll 1
      for (int consumer = 0; consumer < kBiasConsumers; ++consumer) {
        if (!sharing.brings(consumer)) continue;
        const int row = unit.first_row + consumer * kAttentionRows;
        bring.lines(slot.queries[consumer], args.q, full, row, sharing);
        bring.lines(slot.d_out[consumer], args.d_out, full, row, sharing);
      }
      bring.lines(slot.keys, args.k, full, key);
      bring.lines(slot.values, args.v, full, key);
      bring_queries(slot.of_queries, args, full, one, unit.first_row);
      ring.advance();
      if (nth > 0) continue;
      open(shared.bias_full, shared.bias_empty, bias_phase, sizeof(shared.bias));
      bias_phase ^= 1;
#pragma unroll 1
      for (int consumer = 0; consumer < kBiasConsumers; ++consumer) {
#pragma unroll 1
        for (int box = 0; box < L::kColumns / kBiasBox; ++box) {
          bring.bias(shared.bias[consumer][box], args, shared.bias_full, key + box * kBiasBox,
                     unit.first_row + consumer * kAttentionRows, {1, 0});
        }
      }
    }
  }
}

template <class L>
struct GradientConsumer {
  using T = typename L::Element;
  const BiasAttentionArgs& args;
  typename L::Shared& shared;
  Ring<L::kSlots> ring{};
  uint32_t bias_phase = 0;

  // As loaded by TMA: swizzled lines of 16.
  static __device__ __forceinline__ OfRows rows_of(const uint8_t (&of_queries)[kBiasOfQueries]) {
    const Place place = Here::place();
    OfRows rows;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = place.consumer * kAttentionRows + place.row + 8 * r;
      const int line = row / 16;
      const uint32_t at =
          ptx::shared_address(of_queries) + line * kSpan + (row % 16 / 2 ^ line) * 16 + row % 2 * 8;
      rows.row[r] = {ptx::load_shared_word(at), ptx::load_shared_word(at + 4)};
    }
    return rows;
  }

  __device__ __forceinline__ void run(const GradientUnit& unit) {
    float sum[L::kScores];
#pragma unroll
    for (float& one : sum) one = 0;
#pragma unroll 1
    for (int nth = 0; nth < unit.count; ++nth) {
      auto& slot = shared.slot[ring.slot()];
      float score[L::kScores];
      float other[L::kScores];
      find_dropped<L>(args, shared, unit.of(args, nth), unit.tile);
      wait_for(shared.full[ring.slot()], ring.phase());
      // Without pins ptxas moves code that computes these between the products and serialises them.
      ptx::pin(score);
      ptx::pin(other);
      Here::turns().take();
      ptx::wgmma_fence();
      issue_scores<T>(score, slot.queries[Here::consumer()], slot.keys);
      issue_scores<T>(other, slot.d_out[Here::consumer()], slot.values);
      ptx::wgmma_commit();
      Here::turns().pass();
      ptx::wgmma_wait<0>();
      ptx::pin(score);
      ptx::pin(other);
      const OfRows rows = rows_of(slot.of_queries);
      release_shared(shared.empty[ring.slot()], __float_as_uint(rows.row[1].delta));
      ring.advance();
      if (nth == 0) wait_for(shared.bias_full, bias_phase);
      add_bias<T, false>(score, args.scale, shared.bias[Here::consumer()]);
      Unit place{};
      place.first_row = unit.first_row;
      hide_keys<L::kColumns>(args, place, unit.tile, score);
      make_gradients<L>(args, shared, rows, score, other);
#pragma unroll
      for (int i = 0; i < L::kScores; ++i) sum[i] += other[i];
    }
    if (unit.count > 0) {
      release(shared.bias_empty);
      bias_phase ^= 1;
    }
    store(unit, sum);
  }

  __device__ __forceinline__ void store(const GradientUnit& unit,
                                        const float (&sum)[L::kScores]) const {
    const Place place = Here::place();
    const int key = unit.tile * L::kColumns + 2 * place.c;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = unit.first_row + place.consumer * kAttentionRows + place.row + 8 * r;
      if (row >= args.queries) continue;
      T* to = row_at<T>(args.d_bias, unit.batch, unit.head, row) + key;
#pragma unroll
      for (int i = 0; i < L::kScores; i += 4) {
        const int left = args.keys - key - 2 * i;
        const float* both = &sum[i + 2 * r];
        if (left > 1 && args.in_pairs) {
          *reinterpret_cast<uint32_t*>(to + 2 * i) = packed<T>(both[0], both[1]);
          continue;
        }
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          if (t < left) to[2 * i + t] = convert<T>(both[t]);
        }
      }
    }
  }
};

template <class T, int kShape>
__device__ __forceinline__ void run_gradient(const BiasAttentionArgs& args) {
  using L = GradientLayout<T, kShape>;
  run_block<L>([&](typename L::Shared& shared) { feed_gradient<L>(args, shared); },
               [&](typename L::Shared& shared) {
                 GradientConsumer<L> consumer{args, shared};
#pragma unroll 1
                 for (int index = static_cast<int>(blockIdx.x); index < args.units;
                      index += static_cast<int>(gridDim.x)) {
                   consumer.run(GradientUnit::at<L::kColumns>(args, index));
                 }
               });
}

}  // namespace fx_fuser::attention_bias
