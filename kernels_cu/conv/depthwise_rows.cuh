// How depthwise.cuh, depthwise_input.cuh and depthwise_weight.cuh divide an image, and read its
// rows.
//
// A thread has one or two channels and a strip of columns, and walks down the image. In
// channels_last rows are prefetched to shared memory, kDepth - 1 of them in flight (cp.async,
// without barriers or registers). A thread of two 16-bit channels copies and reads its own part of
// it. One 16-bit channel is less than cp.async copies: neighbouring lanes share words of their two
// channels, of which each copies every other column. In contiguous images one row is in registers.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/convert.cuh"
#include "common/packed.cuh"
#include "common/ptx.cuh"
#include "conv/depthwise_args.h"

namespace fx_fuser::depthwise {

constexpr int kDepth = 4;  // rows of pixels in shared memory; a power of two

// A thread's work item: consecutive rows in one strip of columns.
struct Item {
  uint32_t sample;
  int32_t y;
  int32_t x;
  int32_t rows;

  static __device__ __forceinline__ Item at(const DepthwiseGrid& args, uint32_t index,
                                            int columns) {
    const uint32_t row = divide(index, args.strips);
    const uint32_t sample = divide(row, args.chunks);
    const auto y = static_cast<int32_t>(row - sample * args.chunks.size) * args.rows;
    const auto x = static_cast<int32_t>(index - row * args.strips.size) * columns;
    return {sample, y, x, min(args.rows, args.all_rows - y)};
  }
};

// A thread's place in its block, and the block's among those of all channels.
template <int kThreads>
struct Place {
  int lane;         // of the channels
  int first;        // of the block's channels
  int channel;      // of the thread's; as good as any where there are fewer
  uint32_t item;    // the first of the thread's
  uint32_t stride;  // to its next
  uint32_t block;   // of those with the same channels

  // together: lanes wait for each other, so none may leave.
  __device__ __forceinline__ Place(const DepthwiseGrid& args, int channels, bool together)
      : lane(static_cast<int>(threadIdx.x) & ((1 << args.lanes_log2) - 1)),
        block(blockIdx.x / args.groups) {
    const uint32_t group = blockIdx.x % args.groups;
    first = static_cast<int>(group * channels) << args.lanes_log2;
    channel = first + lane * channels;
    // Of an even number of channels: the same one of a pair.
    if (together) channel = min(channel, args.channels - 2 + (lane & 1) * channels % 2);
    const uint32_t side = kThreads >> args.lanes_log2;  // items of a block, side by side
    item = block * side + (threadIdx.x >> args.lanes_log2);
    stride = gridDim.x / args.groups * side;
  }
};

// An image, of which a strip is read. first: its first row and column, which may be outside.
struct Strip {
  const void* image;
  int32_t channels;
  int32_t h;
  int32_t w;
  uint32_t sample;
  int32_t channel;
  int32_t row;
  int32_t column;
  int32_t count;  // of rows
};

// Reads a strip's rows of kWindow pixels, from the top. In channels_last the caller commits and
// waits for the copies.
template <class XOf, int kWindow, int kChannels, bool kPlanes, int kThreads>
struct Rows {
  using X = XOf;
  using Raw = Packed<X, kChannels>;
  static constexpr bool kIsPlanes = kPlanes;
  static constexpr bool kSharesWords = !kPlanes && sizeof(Raw) < 4;
  // Of which a thread copies every kStep-th.
  static constexpr int kStep = kSharesWords ? 2 : 1;
  using Copied = std::conditional_t<kSharesWords, Packed<X, 2>, Raw>;

  struct Shared {
    alignas(16) Raw row[kPlanes ? 1 : kDepth][kPlanes ? 1 : kWindow][kThreads];
  };

  Shared& shared;
  const X* ahead;  // the next row to request
  int64_t pitch;   // of a row
  int32_t pixel;   // elements from one to the next
  int32_t h;
  uint32_t columns;  // a bit per column that exists, from the first that is copied
  int32_t first;     // the first row's index in the image
  int32_t count;
  Raw next[kPlanes ? kWindow : 1];

  __device__ __forceinline__ Rows(const Strip& of, Shared& in)
      : shared(in),
        pixel(kPlanes ? 1 : of.channels),
        h(of.h),
        columns(0),
        first(of.row),
        count(of.count) {
    const int64_t plane = static_cast<int64_t>(of.h) * of.w;
    const int begin = kSharesWords ? static_cast<int>(threadIdx.x & 1) : 0;
    const int column = of.column + begin;
    pitch = static_cast<int64_t>(of.w) * pixel;
    ahead = static_cast<const X*>(of.image) + of.sample * plane * of.channels +
            (of.channel - begin) * (kPlanes ? plane : 1) + first * pitch +
            static_cast<int64_t>(column) * pixel;
#pragma unroll
    for (int c = 0; c < kWindow; c += kStep) {
      columns |= static_cast<uint32_t>(c + begin < kWindow && static_cast<uint32_t>(column + c) <
                                                                  static_cast<uint32_t>(of.w))
                 << c;
    }
    columns = ptx::opaque(columns);
    // Other lanes may still read what the last item has left.
    if constexpr (kSharesWords) __syncwarp();
  }

  // Whether it is a row of the image. Rows above and below are zeros, which add nothing.
  __device__ __forceinline__ bool has(int row) const {
    return row < count && static_cast<uint32_t>(first + row) < static_cast<uint32_t>(h);
  }

  // Requests a row. All are requested in order.
  __device__ __forceinline__ void ask(int row) {
    if (has(row)) {
      const int64_t step = kPlanes ? 1 : ptx::opaque(pixel);
#pragma unroll
      for (int c = 0; c < kWindow; c += kStep) {
        const auto* from = reinterpret_cast<const Copied*>(ahead + c * step);
        const bool reads = columns >> c & 1;
        if constexpr (kPlanes) {
          next[c] = reads ? *from : Raw{};
        } else if constexpr (kSharesWords) {
          const int lane = static_cast<int>(threadIdx.x & 1);
          if (c + 1 < kWindow || lane == 0) {
            const Raw* to = &shared.row[row % kDepth][c + lane][threadIdx.x - lane];
            ptx::copy_async(ptx::shared_address(to), from, reads);
          }
        } else {
          ptx::copy_async(ptx::shared_address(&shared.row[row % kDepth][c][threadIdx.x]), from,
                          reads);
        }
      }
    }
    ahead += pitch;
  }

  __device__ __forceinline__ void read(int row, Raw (&raw)[kWindow]) const {
#pragma unroll
    for (int c = 0; c < kWindow; ++c) {
      raw[c] = kPlanes ? next[c] : shared.row[row % kDepth][c][threadIdx.x];
    }
  }
};

// Copies the weights of a block's channels, turned round if `turned`. Called by all of its threads.
template <int kTaps, int kThreads, class X>
__device__ __forceinline__ void copy_weights(X* to, const void* weight, const DepthwiseGrid& args,
                                             int first, int channels, bool turned) {
  const int count = (channels << args.lanes_log2) * kTaps;
  const int64_t exist = static_cast<int64_t>(args.channels - first) * kTaps;
  const auto* from = static_cast<const X*>(weight) + static_cast<int64_t>(first) * kTaps;
  for (int i = threadIdx.x; i < count && i < exist; i += kThreads) {
    to[turned ? (2 * (i / kTaps) + 1) * kTaps - 1 - i : i] = from[i];
  }
  __syncthreads();
}

// Waits for the oldest row in flight, which then all lanes that share it may read.
template <class R>
__device__ __forceinline__ void wait_for_row() {
  ptx::copy_async_wait_for_groups<kDepth - 2>();
  if constexpr (R::kSharesWords) __syncwarp();
}

template <class Raw, int kWindow, int kChannels>
__device__ __forceinline__ void widen(const Raw (&raw)[kWindow],
                                      float (&pixel)[kWindow][kChannels]) {
#pragma unroll
  for (int c = 0; c < kWindow; ++c) {
#pragma unroll
    for (int v = 0; v < kChannels; ++v) pixel[c][v] = convert<float>(raw[c][v]);
  }
}

// Requests the first rows of an image in channels_last, or the first row of planes.
template <class R>
__device__ __forceinline__ void begin(R& rows) {
  if constexpr (R::kIsPlanes) {
    rows.ask(0);
  } else {
#pragma unroll
    for (int row = 0; row < kDepth - 1; ++row) {
      rows.ask(row);
      ptx::copy_async_commit();
    }
  }
}

// Returns a row's pixels, if it has any, and requests a later row.
template <class R, int kWindow, int kChannels>
__device__ __forceinline__ bool take(R& rows, int row, float (&pixel)[kWindow][kChannels]) {
  typename R::Raw raw[kWindow];
  const bool found = rows.has(row);
  if constexpr (R::kIsPlanes) {
    rows.read(row, raw);
    rows.ask(row + 1);
  } else {
    wait_for_row<R>();
    if (found) rows.read(row, raw);
    rows.ask(row + kDepth - 1);
    ptx::copy_async_commit();
  }
  widen(raw, pixel);
  return found;
}

}  // namespace fx_fuser::depthwise
