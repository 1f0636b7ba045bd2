// out[m, n] = epilogue(z, operands...), z = sum over k of x[m, k] weight[n, k] + bias[n], for
// sm_90a: fp32-accurate on the fp16 tensor cores.
//
// Each operand is two fp16 (split_sm90.cuh), and three products are summed:
//
//   x w ~ x_lo w_hi + x_hi w_lo + x_hi w_hi
//
// - x is split by a pre-pass, with one scale a row. The weight is split in registers on its way to
//   the tensor core, with one scale for each row of a tile, which is a guess: it brings the largest
//   of the row's first 192 of k, which are in shared memory by then, to [2^9, 2^10). Later values
//   may be nearly 64 times larger.
// - Where one is larger still, its hi is an infinity, and no sum of that row of the tile is finite.
//   That is seen for free; after a block's other tiles such a tile is done again by the same loop,
//   with the true largest of its rows, found by a pass over them. There is no state between calls
//   that could be stale. A weight that begins with zeros costs time, not accuracy.
// - What the split loses of a weight is at most 2^-22 of it or, where it is small, 2^-34 of the
//   largest of its row's first 192 (2^-39 of the row's largest in a tile done again): the error is
//   normwise for a row of the weight, as it is for a row of x (2^-39).
// - The tensor core truncates when it accumulates: every 64 of k the accumulators are added to sums
//   in fp32 registers.
// - The tile is computed transposed, weight times xᵀ: the fp32 operand must be the one that wgmma
//   takes from registers, and a thread then reads just the rows of the weight whose sums it holds.
// - A z that is not finite even then is computed by plain fp32 arithmetic (`repair`): products of
//   split infinities are NaN, and sums overflow where a weight is beyond about 2^100. So are z that
//   are too small beside their rows' largest for what the split loses there: large columns of x
//   meet small ones of the weight, or the other way round (`strained_rows`).
//
// - A turned weight is one whose n are adjacent in memory (in a backward pass, or written as x w):
//   a kernel of its own, which loads columns from shared memory and is else the same.
//
// Blocks are persistent: one warpgroup feeds shared memory, two of 64 rows of the weight each
// compute. They take turns at the tensor core: while one's products run the other promotes and
// splits.
//
// The generated translation unit is that of pointwise.cuh with another last line, where in[0] is z:
//
//   FX_FUSER_LINEAR_SPLIT(Epilogue, /*scalars*/ 1, /*Acc*/ float, /*Out*/ float, /*z*/ float,
//                         /*operands*/ float...)
#pragma once

#include <utility>

#include "convert.cuh"
#include "epilogue_math.cuh"
#include "linear_split_args.h"
#include "ptx_sm90.cuh"
#include "split_sm90.cuh"
#include "transpose.cuh"

namespace fx_fuser::linear_split {

constexpr int kConsumers = 2;
constexpr int kWarpgroup = 128;
constexpr int kProducerRegisters = 40;
constexpr int kConsumerRegisters = 232;
constexpr int kTileM = kLinearTileM;
constexpr int kTileN = kLinearTileN;
constexpr int kTileK = kLinearTileK;
constexpr int kWarpN = 16;                  // rows of the weight whose sums a warp holds
constexpr int kHeadRoom = 5;                // of a guessed scale: see Scale::of
constexpr int kBatchM = 32;                 // rows of x that the epilogue handles at once
constexpr int kExchangePitch = kWarpN + 4;  // such that the accumulators' layout has no conflicts
constexpr int kGroupM = 8;  // tiles of x side by side: they and the weight's share the L2
static_assert(kLinearThreads == (kConsumers + 1) * kWarpgroup);
static_assert(kConsumerRegisters * kConsumers * kWarpgroup + kProducerRegisters * kWarpgroup <=
              64 * 1024);

// ---- shared memory ------------------------------------------------------------------------------

// 64 of k. Rows are 128 bytes, swizzled: the 16-byte chunk c of row r lies at chunk c ^ (r % 8).
struct WeightSlot {
  union {
    float box[kTileK / kLinearBox][kTileN][kLinearBox];     // [k][n][k]
    float turned[kTileN / kLinearBox][kTileK][kLinearBox];  // [n][k][n]
  };
};
struct XSlot {
  __half part[2 /*hi, lo*/][kTileM][kTileK];
};
static_assert(sizeof(WeightSlot) + sizeof(XSlot) == kLinearStageBytes);
static_assert(sizeof(WeightSlot) % 1024 == 0 && sizeof(XSlot) % 1024 == 0);

// Two rings: a slot of the weight is free once it is in registers, one of x once its products are
// done, more than a turn later.
struct Barriers {
  uint64_t full[kLinearStages];
  uint64_t empty[kLinearStages];
};

// Of a consumer's warp, for the epilogue.
struct Exchange {
  float z[kBatchM][kExchangePitch];
  float x_unscale[kTileM];
};

struct Shared {
  WeightSlot weight[kLinearStages];
  XSlot x[kLinearStages];
  Exchange exchange[kConsumers * kWarpgroup / 32];
  Barriers of_weight;
  Barriers of_x;
  uint64_t walked;     // the consumers are through with the ordinary tiles, and any_again is final
  uint32_t any_again;  // of this block's tiles
};
static_assert(sizeof(Shared) == kLinearSharedBytes);

// Where in a ring a reader or writer is.
struct Cursor {
  int slot = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void advance() {
    if (++slot == kLinearStages) {
      slot = 0;
      phase ^= 1;
    }
  }
  __device__ __forceinline__ void wait_until_full(Barriers& barriers) const {
    ptx::mbarrier_wait(ptx::shared_address(&barriers.full[slot]), phase);
  }
  __device__ __forceinline__ void wait_until_empty(Barriers& barriers) const {
    ptx::mbarrier_wait(ptx::shared_address(&barriers.empty[slot]), phase ^ 1);
  }
};

// ---- which tile ---------------------------------------------------------------------------------

struct Tile {
  int m;  // first row of x
  int n;  // first row of the weight
};

// Columns of kGroupM tiles of x; in a group the weight is walked once.
__device__ __forceinline__ Tile tile_at(const LinearSplitArgs& args, int index) {
  const int m_tiles = (args.m + kTileM - 1) / kTileM;
  const int n_tiles = args.tiles / m_tiles;
  const int group = index / (kGroupM * n_tiles);
  const int inside = index - group * kGroupM * n_tiles;
  const int width = min(kGroupM, m_tiles - group * kGroupM);
  return {(group * kGroupM + inside % width) * kTileM, inside / width * kTileN};
}

// A block's tiles, in the order in which all of its warps walk them: every one, then once more
// those where a consumer's warp saw that the scale of a row was guessed too large.
struct Walk {
  const LinearSplitArgs& args;
  Shared& shared;
  bool again = false;
  int index = static_cast<int>(blockIdx.x - gridDim.x);

  // To the next tile; false where there is none. `uniform` says of a warp's lanes, which all ask
  // the same, what they all know to be the same.
  template <class Uniform>
  __device__ __forceinline__ bool next(const Uniform& uniform) {
    for (;;) {
      index += gridDim.x;
      if (index >= args.tiles) {
        if (again) return false;
        ptx::mbarrier_wait(ptx::shared_address(&shared.walked), 0);
        if (!uniform(shared.any_again != 0)) return false;
        again = true;
        index = static_cast<int>(blockIdx.x);
      }
      if (!again || uniform(args.again[index] != 0)) return true;
    }
  }

  // A consumer's warp, of each ordinary tile.
  __device__ __forceinline__ void report(bool failed) const {
    if (threadIdx.x % 32 != 0) return;
    reinterpret_cast<uint8_t*>(args.again + index)[threadIdx.x / 32] = failed;
    if (failed) atomicOr(&shared.any_again, 1);
    if (index + static_cast<int>(gridDim.x) >= args.tiles) {
      ptx::mbarrier_arrive(ptx::shared_address(&shared.walked));
    }
  }
};

// ---- producers ----------------------------------------------------------------------------------

// feed(tile, k) for every stage. A tile done again comes twice: for its scales, for its products.
template <class Feed>
__device__ __forceinline__ void feed_stages(const LinearSplitArgs& args, Shared& shared,
                                            const Feed& feed) {
  Walk walk{args, shared};
  while (walk.next([](bool value) { return value; })) {
    const Tile tile = tile_at(args, walk.index);
    for (int pass = walk.again ? 0 : 1; pass < 2; ++pass) {
      for (int k = 0; k < args.k; k += kTileK) feed(tile, k);
    }
  }
}

template <bool kTurned>
__device__ __forceinline__ void feed_weight(const LinearSplitArgs& args, Shared& shared) {
  // A weight that only one tile of x meets is read once.
  const uint64_t policy = args.m <= kTileM ? ptx::kEvictFirst : ptx::kEvictNormal;
  Cursor cursor;
  feed_stages(args, shared, [&](Tile tile, int k) {
    WeightSlot& slot = shared.weight[cursor.slot];
    const uint32_t full = ptx::shared_address(&shared.of_weight.full[cursor.slot]);
    cursor.wait_until_empty(shared.of_weight);
    ptx::mbarrier_arrive_expect_tx(full, sizeof(WeightSlot));
    if constexpr (kTurned) {
#pragma unroll
      for (int box = 0; box < kTileN / kLinearBox; ++box) {
        ptx::tensor_load(ptx::shared_address(slot.turned[box]), args.weight_map, full, policy,
                         tile.n + box * kLinearBox, k);
      }
    } else {
#pragma unroll
      for (int box = 0; box < kTileK / kLinearBox; ++box) {
        ptx::tensor_load(ptx::shared_address(slot.box[box]), args.weight_map, full, policy,
                         k + box * kLinearBox, tile.n);
      }
    }
    cursor.advance();
  });
}

__device__ __forceinline__ void feed_x(const LinearSplitArgs& args, Shared& shared) {
  Cursor cursor;
  feed_stages(args, shared, [&](Tile tile, int k) {
    const uint32_t full = ptx::shared_address(&shared.of_x.full[cursor.slot]);
    cursor.wait_until_empty(shared.of_x);
    ptx::mbarrier_arrive_expect_tx(full, sizeof(XSlot));
    ptx::tensor_load(ptx::shared_address(shared.x[cursor.slot].part), args.x_map, full,
                     ptx::kEvictLast, k, tile.m, 0);
    cursor.advance();
  });
}

// ---- the weight, from shared memory to wgmma's operand ------------------------------------------

// A thread's part of a stage: rows g and g + 8 of its warp's 16, chunks 2c and 2c + 1 of each 32 of
// k. Chunk 2c + j of box b is its part of the wgmma over k positions 32b + 16j...32b + 16j + 15.
// Of a turned weight, what wgmma asks for in order: k 2c, 2c + 1, 2c + 8 and 2c + 9 of each 16.
template <bool kTurned>
struct RawWeight {
  float4 chunk[kTileK / 16][2 /*row*/];

  // Where a thread's loads begin in a slot; `row` is that of g in the tile.
  static __device__ __forceinline__ uint32_t place_of(int row, int g, int c) {
    if constexpr (kTurned) {
      const int column = row % kLinearBox;
      return row / kLinearBox * (kTileK * kLinearBox * 4) + 2 * c * kLinearBox * 4 +
             ((column / 4 ^ 2 * c) << 4) + column % 4 * 4;
    } else {
      return row * kLinearBox * 4 + ((2 * c ^ g) << 4);
    }
  }

  // Free of bank conflicts: the eight lanes of one phase have eight different swizzled chunks; of a
  // turned weight the 32 lanes have the words of eight.
  __device__ __forceinline__ void load(uint32_t address) {
#pragma unroll
    for (int step = 0; step < kTileK / 16; ++step) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        if constexpr (kTurned) {
          // Row g + 8 is two chunks on, and an odd k swizzles to the neighbour.
          const auto at = [&](int k) {
            return ptx::load_shared_word((address ^ row << 5 ^ (k & 1) << 4) +
                                         (step * 16 + k) * kLinearBox * 4);
          };
          chunk[step][row] = make_float4(at(0), at(1), at(8), at(9));
        } else {
          const uint32_t chunk_address = step % 2 ? address ^ 16 : address;
          chunk[step][row] = ptx::load_shared(chunk_address + step / 2 * sizeof(WeightSlot) / 2 +
                                              row * 8 * kLinearBox * 4);
        }
      }
    }
  }

  // What this lane has of one of the two rows.
  __device__ __forceinline__ float largest_in_row(int row) const {
    float largest = largest_of(chunk[0][row]);
#pragma unroll
    for (int step = 1; step < kTileK / 16; ++step) {
      largest = fmaxf(largest, largest_of(chunk[step][row]));
    }
    return largest;
  }
};

// Of a row: the quad's lanes have a part each.
__device__ __forceinline__ float largest_in_quad(float largest) {
  largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, 1));
  return fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, 2));
}

struct Fragments {
  uint32_t hi[kTileK / 16][4];
  uint32_t lo[kTileK / 16][4];

  template <class Raw>
  __device__ __forceinline__ void split_of(const Raw& raw, const float (&scale)[2]) {
#pragma unroll
    for (int step = 0; step < kTileK / 16; ++step) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const float4 v = raw.chunk[step][row];
        const SplitPair front = split(v.x * scale[row], v.y * scale[row]);
        const SplitPair back = split(v.z * scale[row], v.w * scale[row]);
        hi[step][row] = front.hi;
        hi[step][2 + row] = back.hi;
        lo[step][row] = front.lo;
        lo[step][2 + row] = back.lo;
      }
    }
  }

  __device__ __forceinline__ void pin() {
#pragma unroll
    for (int step = 0; step < kTileK / 16; ++step) {
      ptx::pin(hi[step]);
      ptx::pin(lo[step]);
    }
  }
};

// ---- consumers ----------------------------------------------------------------------------------

// Lets the two consumers issue in turn, the first one first.
struct Turn {
  int consumer;

  __device__ __forceinline__ static void wait_for(int consumer) {
    ptx::barrier_sync<kConsumers * kWarpgroup>(1 + consumer);
  }
  __device__ __forceinline__ static void pass_to(int consumer) {
    ptx::barrier_arrive<kConsumers * kWarpgroup>(1 + consumer);
  }
  __device__ __forceinline__ void begin() const {
    if (consumer == 1) pass_to(0);
  }
  __device__ __forceinline__ void take() const { wait_for(consumer); }
  __device__ __forceinline__ void pass() const { pass_to(1 - consumer); }
  // The second consumer's last pass is still to be met.
  __device__ __forceinline__ void end() const {
    if (consumer == 0) wait_for(0);
  }
};

// accumulator = the three products with x. The small ones first: what the tensor core truncates is
// relative to the sum so far.
__device__ __forceinline__ void issue_products(float (&accumulator)[64], Fragments& weight,
                                               const XSlot& slot, const Turn& turn) {
  const uint64_t x_hi = ptx::matrix_descriptor(ptx::shared_address(slot.part[0]));
  const uint64_t x_lo = ptx::matrix_descriptor(ptx::shared_address(slot.part[1]));
  constexpr int kDescriptorStep = 16 * sizeof(__half) / 16;
  constexpr int kSteps = kTileK / 16;
  // Pinned here, else ptxas serialises the products or sinks the splitting behind the barrier.
  ptx::pin(accumulator);
  weight.pin();
  turn.take();
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    ptx::wgmma_m64n128k16(accumulator, weight.hi[step], x_lo + step * kDescriptorStep, step > 0);
    ptx::wgmma_m64n128k16(accumulator, weight.lo[step], x_hi + step * kDescriptorStep, true);
  }
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    ptx::wgmma_m64n128k16(accumulator, weight.hi[step], x_hi + step * kDescriptorStep, true);
  }
  ptx::wgmma_commit();
  turn.pass();
}

// Sums of more than kLinearChunk of k are sums of such sums, each begun at zero: adding a thousand
// terms to one fp32 would cost more than cuBLAS's own error. What is done waits in memory, as
// [block][16][thread] float4.
constexpr int kChunkTiles = kLinearChunkK / kTileK;

__device__ __forceinline__ float4* parking_place(const LinearSplitArgs& args) {
  return args.parked + blockIdx.x * (16 * kConsumers * kWarpgroup) + threadIdx.x;
}

__device__ __forceinline__ void park(const LinearSplitArgs& args, float (&sum)[64], bool first) {
  float4* place = parking_place(args);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float4 before = make_float4(0, 0, 0, 0);
    if (!first) before = place[i * kConsumers * kWarpgroup];
    place[i * kConsumers * kWarpgroup] =
        make_float4(before.x + sum[4 * i], before.y + sum[4 * i + 1], before.z + sum[4 * i + 2],
                    before.w + sum[4 * i + 3]);
#pragma unroll
    for (int e = 0; e < 4; ++e) sum[4 * i + e] = 0;
  }
}

__device__ __forceinline__ void unpark(const LinearSplitArgs& args, float (&sum)[64]) {
  const float4* place = parking_place(args);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float4 before = place[i * kConsumers * kWarpgroup];
    sum[4 * i] += before.x;
    sum[4 * i + 1] += before.y;
    sum[4 * i + 2] += before.z;
    sum[4 * i + 3] += before.w;
  }
}

// The rows of x all of whose sums in this warp are small, but not all zero: bit 2i + t of a lane is
// row 8i + 2 (lane % 4) + t. The sums are still scaled, so that an operand loses at most 2^-25 an
// element, and the other one's row is at most 2^15 times that: whatever the data, kLeastSum sqrt(k)
// is where that can reach 3e-7 of 16 sums. How far data of what kind is above it: NOTES.md.
__device__ __forceinline__ uint32_t strained_rows(const float (&sum)[64], float least) {
  float smallest = INFINITY;  // of the larger ones of a thread's two sums of a row
#pragma unroll
  for (int i = 0; i < 64; i += 4) {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      smallest = fminf(smallest, fmaxf(fabsf(sum[i + t]), fabsf(sum[i + 2 + t])));
    }
  }
  if (!__any_sync(0xFFFFFFFF, smallest < least)) return 0;
  uint32_t large = 0;
  uint32_t any = 0;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const float larger = fmaxf(fabsf(sum[4 * i + t]), fabsf(sum[4 * i + 2 + t]));
      const uint32_t bit = 1u << (2 * i + t);
      large |= larger >= least ? bit : 0;
      any |= larger > 0 ? bit : 0;
    }
  }
#pragma unroll
  for (int distance = 4; distance < 32; distance *= 2) {
    large |= __shfl_xor_sync(0xFFFFFFFF, large, distance);
    any |= __shfl_xor_sync(0xFFFFFFFF, any, distance);
  }
  return any & ~large;
}

// finish(index, sum, strained) for every tile of the block, sum[4i + 2r + t] being the one of
//   weight row 64 consumer + 16 warp + lane / 4 + 8r and x row 8i + 2 (lane % 4) + t
// still in the scale of x's row, and strained the rows of x; then finish.repair().
//
// What decides the speed is the path from one product's end to the next one's issue: promote,
// split, issue. It must be shorter than the other consumer's products. All else stands after the
// issue, where the warp would only wait.
template <bool kTurned, class Finish>
__device__ __forceinline__ void consume(const LinearSplitArgs& args, Shared& shared, int consumer,
                                        Finish& finish) {
  const int thread = threadIdx.x % kWarpgroup;
  const int lane = thread % 32;
  const int g = lane / 4;
  const int c = lane % 4;
  const int row = consumer * 64 + thread / 32 * 16 + g;
  const uint32_t place = RawWeight<kTurned>::place_of(row, g, c);
  const int k_tiles = (args.k + kTileK - 1) / kTileK;

  Cursor stage;  // that is read next, or whose products are issued next
  RawWeight<kTurned> raw;
  const auto read = [&](const Cursor& from) {
    from.wait_until_full(shared.of_weight);
    from.wait_until_full(shared.of_x);
    raw.load(ptx::shared_address(shared.weight[from.slot].box) + place);
  };
  const auto release = [&](Barriers& barriers, int slot) {
    if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&barriers.empty[slot]));
  };

  const Turn turn{consumer};
  turn.begin();
  Walk walk{args, shared};
  while (walk.next([](bool value) { return __any_sync(0xFFFFFFFF, value) != 0; })) {
    finish.begin(walk.index);
    // A guess looks ahead at stages that stay in shared memory, the truth takes a pass of its own.
    float largest[2] = {0, 0};
    Cursor ahead = stage;
    const int seen = walk.again ? k_tiles : min(k_tiles, kLinearStages);
#pragma unroll 1
    for (int i = 0; i < seen; ++i) {
      read(ahead);
#pragma unroll
      for (int r = 0; r < 2; ++r) largest[r] = fmaxf(largest[r], raw.largest_in_row(r));
      if (walk.again) {
        ptx::pin(largest);
        __syncwarp();
        release(shared.of_weight, ahead.slot);
        release(shared.of_x, ahead.slot);
      }
      ahead.advance();
    }
    if (walk.again) stage = ahead;
    finish.place();
    float scale[2];
    float unscale[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const Scale found = Scale::of(largest_in_quad(largest[r]), walk.again ? 0 : kHeadRoom);
      scale[r] = found.scale;
      unscale[r] = found.unscale;
    }

    ptx::pin(scale);
    float sum[64];
#pragma unroll
    for (float& one : sum) one = 0;
    float accumulator[64];
    Fragments weight;
    read(stage);
    for (int begin = 0; begin < k_tiles; begin += kChunkTiles) {
      if (begin > 0) park(args, sum, /*first=*/begin == kChunkTiles);
      const int end = min(begin + kChunkTiles, k_tiles);
      for (int k_tile = begin; k_tile < end; ++k_tile) {
        const int slot = stage.slot;
        weight.split_of(raw, scale);
        issue_products(accumulator, weight, shared.x[slot], turn);
        release(shared.of_weight, slot);
        stage.advance();
        if (k_tile + 1 < k_tiles) read(stage);
        ptx::wgmma_wait<0>();
        release(shared.of_x, slot);
        ptx::pin(accumulator);
#pragma unroll
        for (int i = 0; i < 64; ++i) sum[i] += accumulator[i];
      }
    }
    if (k_tiles > kChunkTiles) unpark(args, sum);

    if (!walk.again) {
      // A scale too large makes an infinity of a weight, and no sum of its row is then finite.
      float least[2] = {INFINITY, INFINITY};
#pragma unroll
      for (int i = 0; i < 64; ++i) least[i / 2 % 2] = fminf(least[i / 2 % 2], fabsf(sum[i]));
      walk.report(__any_sync(0xFFFFFFFF, fmaxf(least[0], least[1]) == INFINITY));
    }
    const uint32_t strained = strained_rows(sum, args.least_sum);
#pragma unroll
    for (int i = 0; i < 64; ++i) sum[i] *= unscale[i / 2 % 2];
    finish(walk.index, sum, strained);
  }
  turn.end();
  finish.repair();
}

// ---- epilogue -----------------------------------------------------------------------------------

// A warp computes x[m, :] weight[n, :]ᵀ in fp32, as IEEE has it.
__device__ __forceinline__ float plain_product(const LinearSplitArgs& args, int m, int n) {
  constexpr int kInFlight = 8;
  const float* x = args.x + m * args.x_stride;
  const float* weight = args.weight + n * args.weight_stride_n;
  float sum = 0;
  for (int k0 = threadIdx.x % 32; k0 - static_cast<int>(threadIdx.x % 32) < args.k;
       k0 += 32 * kInFlight) {
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int k = k0 + 32 * i;
      if (k < args.k) sum = fmaf(x[k], weight[k * args.weight_stride_k], sum);
    }
    // A NaN stays one: a tensor full of them is soon done.
    if (__any_sync(0xFFFFFFFF, isnan(sum))) return NAN;
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(0xFFFFFFFF, sum, distance);
  }
  return sum;
}

template <class Epilogue, int kScalars, class Out, class Operands, class... In>
struct Finish;

template <class Epilogue, int kScalars, class Out, size_t... kOperand, class... In>
struct Finish<Epilogue, kScalars, Out, std::index_sequence<kOperand...>, In...> {
  static constexpr int kOperands = sizeof...(In);
  static constexpr int kScalarSlots = kScalars > 0 ? kScalars : 1;
  // A product alone, as backward passes need it over few k, is stored from the accumulators'
  // layout, in whole sectors. (With a longer epilogue ptxas then finds a worse order for the loop.)
  static constexpr bool kDirect = kOperands == 0 && kScalars == 0;
  static constexpr int kBatches = kTileM / kBatchM;
  static constexpr int kElements = kBatchM * kWarpN / 32;  // of a lane in a batch
  // Of those, whose operands are loaded together: as many as leave no register to spill.
  static constexpr int kInFlight = kOperands < 2 ? 8 : kOperands < 4 ? 4 : kOperands < 8 ? 2 : 1;
  static_assert(kOperands <= kMaxInputs && kScalars <= kMaxScalars);
  static_assert(kElements % kInFlight == 0 && kBatches * kElements == 64);

  const LinearSplitArgs& args;
  Exchange& exchange;   // this warp's
  int warp_n;           // the warp's first row of the weight, in the tile
  uint32_t unsure = 0;  // of any tile; the same in the warp's lanes of one lane % 4
  bool was_strained = false;
  float bias[kDirect ? 2 : 1];  // of the tile's rows that the lane stores
  float fetched[kTileM / 32];   // on its way to exchange.x_unscale

  struct Inputs {
    float value[1 + kOperands];  // z first

    __device__ __forceinline__ void load(const LinearSplitArgs& args, int64_t m, int64_t n) {
      ((value[1 + kOperand] = convert<float>(static_cast<const In*>(
            args.operand[kOperand]
                .data)[m * args.operand[kOperand].stride_m + n * args.operand[kOperand].stride_n])),
       ...);
    }
  };

  __device__ __forceinline__ float bias_of(int n) const {
    return args.bias != nullptr && n < args.n ? args.bias[n] : 0.0f;
  }

  __device__ __forceinline__ Out result_of(const Inputs& in) const {
    float scalar[kScalarSlots];
#pragma unroll
    for (int s = 0; s < kScalarSlots; ++s) scalar[s] = args.scalar[s];
    return convert<Out>(static_cast<float>(Epilogue{}(in.value, scalar)));
  }

  __device__ __forceinline__ void store(const Inputs& in, int64_t m, int64_t n) const {
    if (args.z != nullptr) args.z[m * args.z_stride + n] = in.value[0];
    static_cast<Out*>(args.out)[m * args.out_stride + n] = result_of(in);
  }

  // Element e of a lane's batch: for each e the warp has two rows of x and all 16 of its n.
  static __device__ __forceinline__ int row_of(int e, int lane) { return 2 * e + lane / kWarpN; }

  // Where in the tile is what a lane stores as its element 0...63?
  static __device__ __forceinline__ int m_of(int element, int lane) {
    return kDirect ? element / 4 * 8 + lane % 4 * 2 + element % 2
                   : element / kElements * kBatchM + row_of(element % kElements, lane);
  }
  __device__ __forceinline__ int n_of(int element, int lane) const {
    return warp_n + (kDirect ? lane / 4 + element / 2 % 2 * 8 : lane % kWarpN);
  }

  // Ahead of the tile's products, which hide the wait.
  __device__ __forceinline__ void begin(int index) {
    const Tile tile = tile_at(args, index);
    const int lane = threadIdx.x % 32;
    bias[0] = bias_of(tile.n + n_of(0, lane));
    if constexpr (kDirect) bias[1] = bias_of(tile.n + n_of(2, lane));
#pragma unroll
    for (int i = 0; i < kTileM / 32; ++i) {
      const int m = tile.m + i * 32 + lane;
      fetched[i] = m < args.m ? args.x_unscale[m] : 0.0f;
    }
  }

  __device__ __forceinline__ void place() {
#pragma unroll
    for (int i = 0; i < kTileM / 32; ++i)
      exchange.x_unscale[i * 32 + threadIdx.x % 32] = fetched[i];
    __syncwarp();
  }

  // Rows are named as by strained_rows. One that has a z that is not finite is done again whole.
  __device__ __forceinline__ void operator()(int index, const float (&sum)[64], uint32_t strained) {
    uint32_t rows;
    if constexpr (kDirect) {
      if (args.z != nullptr) {
        rows = store_as_it_lies<true>(tile_at(args, index), sum);
      } else {
        rows = store_as_it_lies<false>(tile_at(args, index), sum);
      }
      rows = in_any_lane(rows);
    } else {
      rows = store_in_runs(tile_at(args, index), sum);
    }
    rows |= strained;
    if (threadIdx.x % 32 < 4) args.unsure[place_of(index)] = rows;
    unsure |= rows;
    was_strained |= strained != 0;
  }

  // The union of what the lanes of one lane % 4 name.
  static __device__ __forceinline__ uint32_t in_any_lane(uint32_t rows) {
    if (!__any_sync(0xFFFFFFFF, rows != 0)) return 0;
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) {
      rows |= __shfl_xor_sync(0xFFFFFFFF, rows, distance);
    }
    return rows;
  }

  // The same of a bit an element in store_in_runs' order.
  static __device__ __forceinline__ uint32_t rows_of(uint64_t elements) {
    if (!__any_sync(0xFFFFFFFF, elements != 0)) return 0;
    uint32_t rows = 0;
#pragma unroll 1
    for (int element = 0; element < 64; ++element) {
      const uint32_t lanes = __ballot_sync(0xFFFFFFFF, elements >> element & 1);
      if (element % 4 != threadIdx.x % 4) continue;  // of rows 8i + 2 (element % 4) + t
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        if (lanes >> t * kWarpN & 0xFFFF) rows |= 1u << (element / 4 * 2 + t);
      }
    }
    return rows;
  }

  // Without branches an element, each of which would wait for the one before: all is computed, what
  // lies inside is stored.
  template <bool kKeepsZ>
  __device__ __forceinline__ uint32_t store_as_it_lies(Tile tile, const float (&sum)[64]) const {
    uint32_t broken = 0;
    const int lane = threadIdx.x % 32;
    const int m0 = m_of(0, lane);
    const int rows = args.m - (tile.m + m0);
    const int n = tile.n + n_of(0, lane);
    const bool has_column[2] = {n < args.n, n + 8 < args.n};
    Out* out = static_cast<Out*>(args.out) + (tile.m + m0) * args.out_stride + n;
    float* z = kKeepsZ ? args.z + (tile.m + m0) * args.z_stride + n : nullptr;
    constexpr int kAtOnce = 4;
#pragma unroll
    for (int i0 = 0; i0 < 16; i0 += kAtOnce) {
      float2 unscale[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        unscale[i] = *reinterpret_cast<const float2*>(&exchange.x_unscale[m0 + 8 * (i0 + i)]);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
        for (int t = 0; t < 2; ++t) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const int element = 4 * (i0 + i) + 2 * r + t;
            Inputs in;
            in.value[0] = fmaf(sum[element], t ? unscale[i].y : unscale[i].x, bias[r]);
            const bool inside = 8 * (i0 + i) + t < rows && has_column[r];
            const Out result = result_of(in);
            if (inside) out[t * args.out_stride + 8 * r] = result;
            if (kKeepsZ && inside) z[t * args.z_stride + 8 * r] = in.value[0];
            broken |= static_cast<uint32_t>(inside && !isfinite(in.value[0])) << (2 * (i0 + i) + t);
          }
        }
        out += 8 * args.out_stride;
        if (kKeepsZ) z += 8 * args.z_stride;
      }
    }
    return broken;
  }

  // Batch by batch through shared memory, so that a warp reads and writes runs of n.
  __device__ __forceinline__ uint32_t store_in_runs(Tile tile, const float (&sum)[64]) const {
    uint64_t broken = 0;
    const int lane = threadIdx.x % 32;
    const int n = tile.n + n_of(0, lane);
#pragma unroll
    for (int batch = 0; batch < kBatches; ++batch) {
      const int first_m = tile.m + batch * kBatchM;
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        exchange.z[i / 4 * 8 + lane % 4 * 2 + i % 2][lane / 4 + i / 2 % 2 * 8] =
            sum[batch * kElements + i];
      }
      __syncwarp();
#pragma unroll 1
      for (int e0 = 0; e0 < kElements; e0 += kInFlight) {
        Inputs in[kInFlight];
#pragma unroll
        for (int e = 0; e < kInFlight; ++e) {
          const int m = first_m + row_of(e0 + e, lane);
          if (m < args.m && n < args.n) {
            in[e].value[0] =
                fmaf(exchange.z[row_of(e0 + e, lane)][lane % kWarpN],
                     exchange.x_unscale[batch * kBatchM + row_of(e0 + e, lane)], bias[0]);
            in[e].load(args, m, n);
          }
        }
#pragma unroll
        for (int e = 0; e < kInFlight; ++e) {
          const int m = first_m + row_of(e0 + e, lane);
          if (m < args.m && n < args.n) {
            store(in[e], m, n);
            if (!isfinite(in[e].value[0])) broken |= uint64_t{1} << (batch * kElements + e0 + e);
          }
        }
      }
      __syncwarp();
    }
    return rows_of(broken);
  }

  static __device__ __forceinline__ int64_t place_of(int index) {
    return int64_t{index} * kLinearUnsureWords + threadIdx.x / 32 * 4 + threadIdx.x % 4;
  }

  // A lane's elements that are in unsure rows.
  __device__ __forceinline__ uint64_t unsure_elements(int index) const {
    const uint32_t rows = args.unsure[place_of(index)];
    if (!__any_sync(0xFFFFFFFF, rows != 0)) return 0;
    const int lane = threadIdx.x % 32;
    const Tile tile = tile_at(args, index);
    uint64_t elements = 0;
#pragma unroll 1
    for (int element = 0; element < 64; ++element) {
      const int m = m_of(element, lane);
      const uint32_t of_lane = __shfl_sync(0xFFFFFFFF, rows, m / 2 % 4);
      const uint64_t is_unsure = of_lane >> (m / 8 * 2 + m % 2) & 1;
      if (tile.m + m < args.m && tile.n + n_of(element, lane) < args.n) {
        elements |= is_unsure << element;
      }
    }
    return elements;
  }

  // After all tiles: divergent code within the loop over them would cost ptxas its knowledge that
  // the stages' addresses are uniform, and descriptors would then reach each wgmma through R2UR.
  __device__ __forceinline__ void repair() const {
    if (was_strained) *args.was_strained = 1;
    if (!__any_sync(0xFFFFFFFF, unsure != 0)) return;
    __syncwarp();  // the rows are read by other lanes than wrote them
    for (int index = blockIdx.x; index < args.tiles; index += gridDim.x) {
      repair(tile_at(args, index), unsure_elements(index));
    }
  }

  // The warp goes through its lanes' elements one by one.
  __device__ __forceinline__ void repair(Tile tile, uint64_t elements) const {
    const int lane = threadIdx.x % 32;
    while (const uint32_t lanes = __ballot_sync(0xFFFFFFFF, elements != 0)) {
      const int owner = __ffs(lanes) - 1;
      const int bit = __ffsll(__shfl_sync(0xFFFFFFFF, elements, owner)) - 1;
      const int m = tile.m + m_of(bit, owner);
      const int n = tile.n + n_of(bit, owner);
      const float product = plain_product(args, m, n);
      if (lane == owner) {
        Inputs in;
        in.value[0] = product + bias_of(n);
        in.load(args, m, n);
        store(in, m, n);
        elements &= elements - 1;
      }
    }
  }
};

// ---- the kernel ---------------------------------------------------------------------------------

template <bool kTurned, class Epilogue, int kScalars, class Acc, class Out, class Z, class... In>
__device__ __forceinline__ void run(const LinearSplitArgs& args) {
  static_assert(std::is_same_v<Acc, float> && std::is_same_v<Z, float>);
  // Declared aligned, so that the compiler knows the low bits of what becomes descriptors.
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
  if (ptx::shared_address(dynamic_shared) % 1024 != 0) __trap();

  if (threadIdx.x == 0) {
    for (Barriers* barriers : {&shared.of_weight, &shared.of_x}) {
      for (int slot = 0; slot < kLinearStages; ++slot) {
        ptx::mbarrier_init(ptx::shared_address(&barriers->full[slot]), 1);
        ptx::mbarrier_init(ptx::shared_address(&barriers->empty[slot]),
                           kConsumers * kWarpgroup / 32);
      }
    }
    ptx::mbarrier_init(ptx::shared_address(&shared.walked), kConsumers * kWarpgroup / 32);
    shared.any_again = 0;
    ptx::fence_mbarrier_init();
  }
  __syncthreads();

  const int warp = threadIdx.x / 32;
  const int warpgroup = threadIdx.x / kWarpgroup;
  if (warpgroup == kConsumers) {
    ptx::give_registers<kProducerRegisters>();
    const int producer = threadIdx.x % kWarpgroup;
    if (producer == 0) {
      feed_weight<kTurned>(args, shared);
    } else if (producer == 32) {
      ptx::wait_for_prerequisites();  // x as the pre-pass splits it
      feed_x(args, shared);
    }
  } else {
    ptx::take_registers<kConsumerRegisters>();
    ptx::wait_for_prerequisites();  // the scales of x's rows
    Finish<Epilogue, kScalars, Out, std::index_sequence_for<In...>, In...> finish{
        args, shared.exchange[warp], warp * kWarpN};
    consume<kTurned>(args, shared, warpgroup, finish);
  }
}

}  // namespace fx_fuser::linear_split

// FX_FUSER_LINEAR_SPLIT(Epilogue, scalars, Acc, Out, Z, Operands...)
#define FX_FUSER_LINEAR_SPLIT(...)                                                           \
  extern "C" __global__ void __launch_bounds__(fx_fuser::kLinearThreads, 1)                  \
      fx_fuser_linear_split(const __grid_constant__ fx_fuser::LinearSplitArgs args) {        \
    fx_fuser::linear_split::run<false, __VA_ARGS__>(args);                                   \
  }                                                                                          \
  extern "C" __global__ void __launch_bounds__(fx_fuser::kLinearThreads, 1)                  \
      fx_fuser_linear_split_turned(const __grid_constant__ fx_fuser::LinearSplitArgs args) { \
    fx_fuser::linear_split::run<true, __VA_ARGS__>(args);                                    \
  }                                                                                          \
  extern "C" __global__ void __launch_bounds__(fx_fuser::kSplitThreads)                      \
      fx_fuser_linear_split_rows(const __grid_constant__ fx_fuser::SplitRowsArgs args) {     \
    fx_fuser::split_rows(args);                                                              \
  }                                                                                          \
  extern "C" __global__ void __launch_bounds__(fx_fuser::kTransposeThreads)                  \
      fx_fuser_transpose(const __grid_constant__ fx_fuser::TransposeArgs args) {             \
    fx_fuser::transpose(args);                                                               \
  }
