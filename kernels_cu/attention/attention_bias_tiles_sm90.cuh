// Attention with a bias: shared-memory layout, units of work, TMA loads, products.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "attention/attention_bias_args.h"
#include "attention/attention_split_rows.cuh"
#include "common/convert.cuh"
#include "common/ptx_sm90.cuh"
#include "common/wgmma_sm90.cuh"

namespace fx_fuser::attention_bias {

using attention_split::ConsumerThread;
using attention_split::Dropped;
using attention_split::hide_below;
using attention_split::hide_from;
using attention_split::infinity;
using attention_split::kInstructionK;
using attention_split::kLn2;
using attention_split::kSpan;
using attention_split::kWarpgroup;
using attention_split::minus_infinity;
using attention_split::Place;
using attention_split::Ring;
using attention_split::Unit;

using Here = ConsumerThread<kBiasConsumers>;
constexpr float kLog2OfE = 1.44269504088896341f;
constexpr int kConsumerRegisters = 232;
constexpr int kProducerRegisters = 40;
constexpr int kOfSpan = kBiasBox / kInstructionK;  // instructions per line
constexpr int kStep = kInstructionK * 2 / 16;      // in units of 16 bytes, as in descriptors

// Swizzled lines of 128 bytes, 64 elements: the lines of all rows are followed by those of the next
// 64 elements.
template <int kD, int kLines>
struct Lines {
  static constexpr int kCount = kLines;
  uint16_t span[kD / kBiasBox][kLines][kBiasBox];
};
struct BiasBox {
  uint16_t line[kBiasBox][kBiasBox];
};

// Own, and Dropped's words of the consumers' threads.
template <class Own, int kWords>
struct WithDropped : Own {
  uint32_t dropped[kWords][kBiasConsumers * kWarpgroup];
};
template <class Own, bool kDrops, int kScores>
using Beside = std::conditional_t<kDrops, WithDropped<Own, kScores / 32>, Own>;

// Of::kIs: a BiasPass.
template <class T, class Of, bool kTilesAreOfQueries>
struct Layout {
  using Element = T;
  static constexpr BiasPass kIs = Of::kIs;
  static constexpr int kD = kIs.d;
  static constexpr int kColumns = kIs.columns;
  static constexpr int kSlots = kIs.slots;
  static constexpr int kBiases = kIs.biases;
  static constexpr int kOperands = kIs.operands;
  static constexpr int kScores = kColumns / 2;  // per thread and tile
  static constexpr int kSums = kD / 2;          // per thread
  static constexpr int kSteps = kColumns / kInstructionK;
  static constexpr bool kHasColumns = kTilesAreOfQueries;
  static constexpr bool kDrops = kIs.drops;
  using Tile = Lines<kD, kColumns>;
  using RowTile = Lines<kD, kAttentionRows>;

  // A single base class, at offset 0 (attention_split_tiles_sm90.cuh says why).
  struct Pipeline {
    RowTile rows[kOperands][kBiasConsumers];
    Tile tile[kSlots];
    // If rows are queries, a box has a consumer's queries by 64 keys, else 64 queries by its keys.
    BiasBox bias[kBiases][kBiasConsumers][kColumns / kBiasBox];
    uint8_t of_queries[kBiases][kBiasOfQueries];  // if tiles are of queries: AttentionOfQuery
    uint64_t full[kSlots];
    uint64_t empty[kSlots];
    uint64_t bias_full[kBiases];
    uint64_t bias_empty[kBiases];
    uint64_t rows_full[kBiasConsumers];
    uint64_t rows_empty[kBiasConsumers];
  };
  using Shared = Beside<Pipeline, kDrops, kScores>;
  static_assert(sizeof(Shared) == kIs.shared_bytes());

  // Initialises the barriers. Called by one thread, ahead of the cluster's barrier.
  static __device__ __forceinline__ void begin(Shared& shared) {
    const auto init = [](uint64_t& barrier, int arrivals) {
      ptx::mbarrier_init(ptx::shared_address(&barrier), arrivals);
    };
    constexpr int kWarps = 4;
    for (uint64_t& one : shared.full) init(one, 1);
    for (uint64_t& one : shared.bias_full) init(one, 1);
    for (uint64_t& one : shared.rows_full) init(one, 1);
    const int blocks = static_cast<int>(ptx::cluster_size());
    for (uint64_t& one : shared.empty) init(one, kWarps * kBiasConsumers);
    for (uint64_t& one : shared.bias_empty) init(one, kWarps * kBiasConsumers * blocks);
    for (uint64_t& one : shared.rows_empty) init(one, kWarps);
    ptx::fence_mbarrier_init();
  }
};

// Batches vary fastest, since they share the bias. Causal units come longest first.
template <bool kOfKeys>
__device__ __forceinline__ Unit unit_at(const BiasAttentionArgs& args, int columns, int index) {
  Unit unit{};
  const int rest = index / args.batches;
  unit.batch = index - rest * args.batches;
  if (args.is_causal) {
    unit.block = rest / args.heads;
    unit.head = rest - unit.block * args.heads;
    if (!kOfKeys) unit.block = args.blocks - 1 - unit.block;
  } else {
    unit.head = rest / args.blocks;
    unit.block = rest - unit.head * args.blocks;
  }
  unit.first_row = unit.block * kBiasRows;
  int end = kOfKeys ? args.queries : args.keys;
  if (args.is_causal) {
    if (kOfKeys) {
      unit.first_tile = unit.first_row / columns;
    } else {
      end = min(end, unit.first_row + kBiasRows);
    }
  }
  unit.tiles = (end + columns - 1) / columns;
  return unit;
}

// The head's index among all batches' heads.
__device__ __forceinline__ int64_t head_of(const BiasAttentionArgs& args, const Unit& unit) {
  return int64_t{unit.batch} * args.heads + unit.head;
}

// Computes which weights of a tile are dropped, while its scores are not ready yet.
template <class L>
__device__ __forceinline__ void find_dropped(const BiasAttentionArgs& args,
                                             typename L::Shared& shared, const Unit& unit,
                                             int tile) {
  if constexpr (L::kDrops) {
    const Place place = Here::place();
    Dropped<L>::find(shared, args.dropout, static_cast<int>(head_of(args, unit)), place.g, place.c,
                     place.row_of(unit, 0), tile * L::kColumns);
  }
}

// Reads Dropped's bits for scores in ascending order.
template <class L>
struct Drops {
  typename L::Shared& shared;
  uint32_t word = 0;

  __device__ __forceinline__ bool at(int score) {
    if constexpr (L::kDrops) {
      if (score % 32 == 0) word = Dropped<L>::word_of(shared, score / 32);
      return Dropped<L>::has(word, score);
    }
    return false;
  }
};

// ---- the producer thread ------------------------------------------------------------------------

// Loads that a cluster's two blocks share: block `rank` loads consumer `rank`'s part and multicasts
// it to both. Without a cluster a block loads everything itself.
struct Sharing {
  int blocks = static_cast<int>(ptx::cluster_size());
  int rank = static_cast<int>(ptx::cluster_rank());

  __device__ __forceinline__ bool brings(int consumer) const {
    return blocks == 1 || consumer == rank;
  }
  __device__ __forceinline__ void load(uint32_t to, const TensorMap& from, uint64_t& barrier, int x,
                                       int y, int z, int w) const {
    const uint32_t at = ptx::shared_address(&barrier);
    if (blocks == 1) {
      ptx::tensor_load(to, from, at, ptx::kEvictNormal, x, y, z, w);
    } else {
      constexpr uint16_t kBoth = 3;
      ptx::tensor_load_multicast(to, from, at, kBoth, ptx::kEvictNormal, x, y, z, w);
    }
  }
};

// TMA loads of one head's boxes.
struct Bring {
  int head;
  int batch;

  // TMA fills in zeros beyond the last row and the last element.
  template <int kD, int kLines>
  __device__ __forceinline__ void lines(Lines<kD, kLines>& to, const TensorMap& from,
                                        uint64_t& barrier, int first,
                                        const Sharing& sharing = {1, 0}) const {
#pragma unroll 1
    for (int span = 0; span < kD / kBiasBox; ++span) {
#pragma unroll 1
      for (int line = 0; line < kLines; line += kBiasBox) {
        sharing.load(ptx::shared_address(to.span[span][line]), from, barrier, span * kBiasBox,
                     first + line, head, batch);
      }
    }
  }
  __device__ __forceinline__ void bias(BiasBox& to, const BiasAttentionArgs& args,
                                       uint64_t& barrier, int key, int query,
                                       const Sharing& sharing) const {
    sharing.load(ptx::shared_address(&to), args.bias, barrier, key, query,
                 args.bias_heads == 1 ? 0 : head, args.bias_batches == 1 ? 0 : batch);
  }
};

// Waits until a slot is free, then makes its barrier expect this many bytes.
__device__ __forceinline__ void open(uint64_t& full, uint64_t& empty, uint32_t phase,
                                     uint32_t bytes) {
  ptx::mbarrier_wait(ptx::shared_address(&empty), phase ^ 1);
  ptx::mbarrier_arrive_expect_tx(ptx::shared_address(&full), bytes);
}

// Loads AttentionOfQuery of as many queries as the map's box has.
__device__ __forceinline__ void bring_queries(uint8_t (&to)[kBiasOfQueries],
                                              const BiasAttentionArgs& args, uint64_t& full,
                                              const Unit& unit, int query) {
  constexpr int kOfLine = kSpan / sizeof(AttentionOfQuery);
  const auto line = static_cast<int>((head_of(args, unit) * args.padded + query) / kOfLine);
  ptx::tensor_load(ptx::shared_address(to), args.of_queries, ptx::shared_address(&full),
                   ptx::kEvictNormal, 0, line);
}

template <class L>
struct Feed {
  typename L::Shared& shared;
  Ring<L::kSlots> ring{};
  Ring<L::kBiases> biases{};
  uint32_t rows_phase = 0;
  Sharing sharing{};  // of the bias, by the blocks of two batches

  __device__ __forceinline__ void rows(const Bring& bring, const Unit& unit, const TensorMap& first,
                                       const TensorMap& second) {
#pragma unroll 1
    for (int consumer = 0; consumer < kBiasConsumers; ++consumer) {
      uint64_t& full = shared.rows_full[consumer];
      open(full, shared.rows_empty[consumer], rows_phase,
           L::kOperands * sizeof(typename L::RowTile));
      const int row = unit.first_row + consumer * kAttentionRows;
      bring.lines(shared.rows[0][consumer], first, full, row);
      if constexpr (L::kOperands == 2) bring.lines(shared.rows[1][consumer], second, full, row);
    }
    rows_phase ^= 1;
  }
  __device__ __forceinline__ void tile(const Bring& bring, const TensorMap& from, int nth) {
    const int slot = ring.slot();
    open(shared.full[slot], shared.empty[slot], ring.phase(), sizeof(typename L::Tile));
    bring.lines(shared.tile[slot], from, shared.full[slot], nth * L::kColumns);
    ring.advance();
  }
  __device__ __forceinline__ void bias(const Bring& bring, const BiasAttentionArgs& args,
                                       const Unit& unit, int nth) {
    const int slot = biases.slot();
    uint64_t& full = shared.bias_full[slot];
    constexpr uint32_t kBytes = L::kColumns * sizeof(AttentionOfQuery);
    open(full, shared.bias_empty[slot], biases.phase(),
         sizeof(shared.bias[slot]) + (L::kHasColumns ? kBytes : 0));
#pragma unroll 1
    for (int consumer = 0; consumer < kBiasConsumers; ++consumer) {
      if (!sharing.brings(consumer)) continue;
      const int row = unit.first_row + consumer * kAttentionRows;
#pragma unroll 1
      for (int box = 0; box < L::kColumns / kBiasBox; ++box) {
        const int column = nth * L::kColumns + box * kBiasBox;
        bring.bias(shared.bias[slot][consumer][box], args, full, L::kHasColumns ? row : column,
                   L::kHasColumns ? column : row, sharing);
      }
    }
    if constexpr (L::kHasColumns) {
      bring_queries(shared.of_queries[slot], args, full, unit, nth * L::kColumns);
    }
    biases.advance();
  }
};

// ---- consumers ----------------------------------------------------------------------------------

__device__ __forceinline__ void wait_for(const uint64_t& barrier, uint32_t phase) {
  ptx::mbarrier_wait(ptx::shared_address(&barrier), phase);
}
__device__ __forceinline__ void release(const uint64_t& barrier) {
  __syncwarp();  // all lanes have read
  if (ptx::thread_index() % 32 == 0) ptx::mbarrier_arrive(ptx::shared_address(&barrier));
}

// Releases what a cluster's blocks share: arrives in all of them. seen: a word of the last load
// from it. The arrival waits for that word: it takes another way than loads, which may still be
// queued.
__device__ __forceinline__ void release_shared(const uint64_t& barrier, uint32_t seen) {
  __syncwarp();
  const uint32_t lane = ptx::thread_index() % 32;
  const uint32_t blocks = ptx::cluster_size();
  const uint32_t zero = seen & (blocks >> 16);  // which the compiler cannot know
  if (lane < blocks) {
    ptx::mbarrier_arrive_in_cluster(ptx::shared_address(&barrier) + zero, lane);
  }
}

// Starts score = rows · tileᵀ.
template <class T, int kScores, int kD, int kColumns>
__device__ __forceinline__ void issue_scores(float (&score)[kScores],
                                             const Lines<kD, kAttentionRows>& rows,
                                             const Lines<kD, kColumns>& tile) {
  const auto descriptor = [](const void* at) {
    return ptx::matrix_descriptor(ptx::uniform(ptx::shared_address(at)));
  };
  const uint64_t a = descriptor(&rows);
  const uint64_t b = descriptor(&tile);
#pragma unroll
  for (int i = 0; i < kD / kInstructionK; ++i) {
    const int span = i / kOfSpan * (kSpan / 16);
    const int within = i % kOfSpan * kStep;
    ptx::Wgmma<T>::run(score, a + (span * kAttentionRows + within), b + (span * kColumns + within),
                       i > 0);
  }
}

// Starts sum += weights · tile.
template <class T, int kSums, int kSteps, int kD, int kColumns>
__device__ __forceinline__ void issue_results(float (&sum)[kSums],
                                              const uint32_t (&weights)[kSteps][4],
                                              const Lines<kD, kColumns>& tile, bool accumulate) {
  const uint64_t b =
      ptx::transposed_descriptor(ptx::uniform(ptx::shared_address(&tile)), kColumns * kSpan);
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    ptx::WgmmaOfRegisters<T>::run_transposed(sum, weights[i], b + i * (kInstructionK * kSpan / 16),
                                             accumulate || i > 0);
  }
}

template <class T>
__device__ __forceinline__ float2 unpacked(uint32_t word) {
  if constexpr (std::is_same_v<T, __half>) {
    return __half22float2(reinterpret_cast<const __half2&>(word));
  } else {
    return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xFFFF0000));
  }
}
template <class T>
__device__ __forceinline__ uint32_t packed(float first, float second) {
  const auto both = convert_pair<T>(first, second);
  return reinterpret_cast<const uint32_t&>(both);
}

// Rounds scores to the first operand of products.
template <class T, int kScores, int kSteps>
__device__ __forceinline__ void pack(const float (&score)[kScores],
                                     uint32_t (&weights)[kSteps][4]) {
#pragma unroll
  for (int i = 0; i < kScores; i += 2) {
    weights[i / 8][i / 4 % 2 * 2 + i / 2 % 2] = packed<T>(score[i], score[i + 1]);
  }
}

template <int kSteps>
__device__ __forceinline__ void pin(uint32_t (&weights)[kSteps][4]) {
#pragma unroll
  for (auto& step : weights) ptx::pin(step);
}

// score = scale · score + bias. kTransposed: the bias's lines are columns of `score`. Returns a
// word of every load, combined.
template <class T, bool kTransposed, int kScores, int kBoxes>
__device__ __forceinline__ uint32_t add_bias(float (&score)[kScores], float scale,
                                             const BiasBox (&bias)[kBoxes]) {
  const int thread = static_cast<int>(ptx::thread_index()) % kWarpgroup;
  const int matrix = thread % 32 / 8;
  const int warp = thread / 32;
  const int line = thread % 8 + (kTransposed ? matrix / 2 * 8 : warp * 16 + matrix % 2 * 8);
  const int chunk = kTransposed ? warp * 2 + matrix % 2 : matrix / 2;
  const uint32_t first = ptx::shared_address(bias) + line * kSpan + (chunk ^ line % 8) * 16;
  uint32_t seen = 0;
#pragma unroll
  for (int i = 0; i < kScores / 4; i += 2) {  // of eight columns
    const uint32_t box = i / 8 * sizeof(BiasBox);
    const uint32_t at =
        kTransposed ? first + i % 8 * 8 * kSpan : first ^ static_cast<uint32_t>(i % 8 * 16);
    uint32_t word[4];
    if constexpr (kTransposed) {
      ptx::load_transposed(word, at + box);
    } else {
      ptx::load_matrices(word, at + box);
    }
    seen |= word[3];
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      const float2 both = unpacked<T>(word[part]);
      float* to = &score[4 * i + 2 * part];
      to[0] = fmaf(to[0], scale, both.x);
      to[1] = fmaf(to[1], scale, both.y);
    }
  }
  return seen;
}

// Hides keys that do not exist, or that a causal query does not see.
template <int kColumns, int kScores>
__device__ __forceinline__ void hide_keys(const BiasAttentionArgs& args, const Unit& unit, int tile,
                                          float (&score)[kScores]) {
  const int first_key = tile * kColumns;
  int seen = args.keys;
  if (args.is_causal) seen = min(seen, unit.first_row + Here::consumer() * kAttentionRows + 1);
  if (first_key + kColumns <= seen) return;
  int end[2];
  const Place place = Here::place();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = place.row_of(unit, r);
    end[r] = (args.is_causal ? min(args.keys, row + 1) : args.keys) - first_key;
  }
  hide_from(place, end, score);
}

template <class T>
__device__ __forceinline__ T* row_at(const BiasRows& rows, int batch, int head, int row) {
  return static_cast<T*>(rows.data) +
         (batch * rows.batch_stride + head * rows.head_stride + row * rows.row_stride);
}

template <class T, int kSums>
__device__ __forceinline__ void store_row(T* row, int d, const Place& place, int r,
                                          const float (&sum)[kSums], float factor) {
#pragma unroll
  for (int i = 0; i < kSums; i += 4) {
    if (2 * i < d) {
      *reinterpret_cast<uint32_t*>(row + 2 * place.c + 2 * i) =
          packed<T>(sum[i + 2 * r] * factor, sum[i + 2 * r + 1] * factor);
    }
  }
}

// ---- the kernels' frame -------------------------------------------------------------------------

// L has Shared and begin. feed(shared) is called by the producer thread, consume(shared) by the
// consumers.
template <class L, class Feeds, class Consumes>
__device__ __forceinline__ void run_block(const Feeds& feed, const Consumes& consume) {
  // Declared aligned, so that the compiler knows the low bits of descriptors.
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  auto& shared = *reinterpret_cast<typename L::Shared*>(dynamic_shared);
  if (ptx::shared_address(dynamic_shared) % 1024 != 0) __trap();
  if (threadIdx.x == 0) L::begin(shared);
  __syncwarp();
  ptx::cluster_arrive();
  ptx::cluster_wait();
  if (static_cast<int>(threadIdx.x) >= kBiasConsumers * kWarpgroup) {
    ptx::give_registers<kProducerRegisters>();
    if (threadIdx.x == kBiasConsumers * kWarpgroup) feed(shared);
    __syncwarp();
  } else {
    ptx::take_registers<kConsumerRegisters>();
    Here::turns().begin();
    consume(shared);
    Here::turns().end();
  }
  // The other block may still multicast boxes to this one and arrive at its barriers.
  ptx::cluster_arrive();
  ptx::cluster_wait();
}

}  // namespace fx_fuser::attention_bias
