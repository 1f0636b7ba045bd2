// How depthwise.cuh, depthwise_input.cuh and depthwise_weight.cuh divide an image, and read its
// rows.
//
// A thread has one or two channels and a strip of columns, and walks down the image. In
// channels_last rows are prefetched to shared memory, kDepth - 1 of them in flight (cp.async,
// without barriers or registers). Neighbouring lanes have neighbouring channels of the same strip:
// those whose channels are 16 bytes each copy every so many-th pixel for all of them. Where pixels
// are not aligned, a thread copies its own channels, and where these are less than cp.async copies,
// two lanes share. In contiguous images one row is in registers.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/convert.cuh"
#include "common/packed.cuh"
#include "common/ptx.cuh"
#include "conv/depthwise_args.h"

namespace fx_fuser::depthwise {

constexpr int kDepth = 4;  // rows of pixels in shared memory; a power of two

#ifdef FX_FUSER_FEW_REGISTERS
constexpr bool kSpilled = true;
#else
constexpr bool kSpilled = false;
#endif

// Resident blocks of a multiprocessor, which bound a thread's registers.
constexpr int resident(int usual) { return kSpilled ? 1 : usual; }

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

// A thread's place in its block, and the block's among those of all channels. kWarp: all lanes have
// channels of the same item.
template <int kThreads, int kChannels, bool kPlanes, bool kWarp>
struct Place {
  int lanes_log2;
  int lane;         // of the channels
  int first;        // of the block's channels
  int channel;      // of the thread's. Where there are fewer, lanes do again what another does
  int slot;         // of the channel in rows in shared memory
  uint32_t item;    // the first of the thread's
  uint32_t stride;  // to its next
  uint32_t block;   // of those with the same channels

  __device__ __forceinline__ explicit Place(const DepthwiseGrid& args)
      : lanes_log2(kWarp ? 5 : args.lanes_log2) {
    const uint32_t group = blockIdx.x % args.groups;
    block = blockIdx.x / args.groups;
    lane = static_cast<int>(threadIdx.x) & ((1 << lanes_log2) - 1);
    first = static_cast<int>(group * kChannels) << lanes_log2;
    channel = first + lane * kChannels;
    if (!kPlanes) channel = min(channel, args.channels - (kChannels == 2 || lane % 2 == 0 ? 2 : 1));
    slot = static_cast<int>(threadIdx.x) - lane + (channel - first) / kChannels;
    slot = ptx::opaque(slot);
    const uint32_t side = kThreads >> lanes_log2;  // items of a block, side by side
    item = block * side + (threadIdx.x >> lanes_log2);
    stride = gridDim.x / args.groups * side;
  }

  // A bit per lane of the item.
  __device__ __forceinline__ uint32_t lanes() const {
    const uint32_t all = 0xFFFFFFFFU >> (32 - (1 << lanes_log2));
    return all << (threadIdx.x % 32 & ~((1U << lanes_log2) - 1));
  }
};

// Of an image what a thread reads. row, column: the first, which may be outside.
struct Strip {
  const void* image;
  int32_t h;
  int32_t w;
  uint32_t sample;
  int32_t row;
  int32_t column;
  int32_t count;  // of rows
};

// Reads a strip's rows of kWindow pixels, from the top. In channels_last the caller commits and
// waits for the copies.
template <class XOf, int kWindow, int kChannelsOf, bool kPlanesOf, int kThreads>
struct Rows {
  using X = XOf;
  static constexpr int kChannels = kChannelsOf;
  static constexpr bool kPlanes = kPlanesOf;
  using Raw = Packed<X, kChannels>;
  using Wide = Packed<X, 16 / sizeof(X)>;
  using Narrow = std::conditional_t<!kPlanes && sizeof(Raw) < 4, Packed<X, 2>, Raw>;
  // Of so many pixels a thread copies one.
  static constexpr int kWideStep = sizeof(Wide) / sizeof(Raw);
  static constexpr int kWideLog2 = kWideStep == 8 ? 3 : kWideStep == 4 ? 2 : 1;
  static constexpr int kNarrowStep = sizeof(Narrow) / sizeof(Raw);
  static constexpr bool kWarp = kNarrowStep > 1;  // have all lanes of a warp the same item?
  static constexpr int kCopied = (kWindow + kWideStep - 1) / kWideStep * kWideStep;
  using At = Place<kThreads, kChannels, kPlanes, kWarp>;

  struct Shared {
    alignas(16) Raw row[kPlanes ? 1 : kDepth][kPlanes ? 1 : kCopied][kThreads];
  };

  Shared& shared;
  const X* ahead;    // the next row to request, at the first pixel that is copied
  int64_t pitch;     // of a row
  int32_t pixel;     // elements from one to the next
  int32_t to;        // the first row in shared memory, likewise
  uint32_t columns;  // a bit per column that exists, from there on
  uint32_t lanes;    // a bit per lane of the item
  int32_t slot;      // where the thread's channels are in shared memory
  bool is_wide;
  int32_t h;
  int32_t first;  // the first row's index in the image
  int32_t count;
  Raw next[kPlanes ? kWindow : 1];

  __device__ __forceinline__ Rows(const DepthwiseGrid& args, const Strip& of, const At& at,
                                  Shared& in)
      : shared(in),
        pixel(kPlanes ? 1 : args.channels),
        columns(0),
        lanes(at.lanes()),
        slot(at.slot),
        is_wide(args.wide),
        h(of.h),
        first(of.row),
        count(of.count) {
    int channel = at.channel;
    int place = static_cast<int>(threadIdx.x);
    int begin = 0;  // the first of the pixels that it copies
    if constexpr (!kPlanes) {
      if (is_wide) {
        const int chunks_log2 = at.lanes_log2 - kWideLog2;  // of a pixel
        const int chunk = at.lane & ((1 << chunks_log2) - 1);
        begin = at.lane >> chunks_log2;
        channel = at.first + chunk * kWideStep * kChannels;
        place += chunk * kWideStep - at.lane;
      } else if (kNarrowStep > 1) {
        begin = at.lane % 2;
        channel -= begin;
        place -= begin;
      }
    }
    const int64_t plane = static_cast<int64_t>(of.h) * of.w;
    const int column = of.column + begin;
    pitch = static_cast<int64_t>(of.w) * pixel;
    ahead = static_cast<const X*>(of.image) + of.sample * plane * args.channels +
            channel * (kPlanes ? plane : 1) + first * pitch + static_cast<int64_t>(column) * pixel;
#pragma unroll
    for (int c = 0; c < kWindow; ++c) {
      const bool exists = static_cast<uint32_t>(column + c) < static_cast<uint32_t>(of.w);
      columns |= static_cast<uint32_t>(exists && c + begin < kWindow) << c;
    }
    columns = ptx::opaque(channel < args.channels ? columns : 0);
    if constexpr (!kPlanes) {
      to = ptx::opaque(static_cast<int>(ptx::shared_address(&shared.row[0][begin][place])));
      meet();  // others may still read what the last item has left
    }
  }

  // The lanes of an item wait for each other.
  __device__ __forceinline__ void meet() const {
    if constexpr (kWarp) {
      __syncwarp();
    } else {
      __syncwarp(lanes);
    }
  }

  // Whether it is a row of the image. Rows above and below are zeros, which add nothing.
  __device__ __forceinline__ bool has(int row) const {
    return row < count && static_cast<uint32_t>(first + row) < static_cast<uint32_t>(h);
  }

  template <class Copied>
  __device__ __forceinline__ void copy(int32_t row) const {
    constexpr int kStep = sizeof(Copied) / sizeof(Raw);
    const int64_t step = ptx::opaque(pixel);
#pragma unroll
    for (int c = 0; c < kWindow; c += kStep) {
      ptx::copy_async(row + c * static_cast<int>(kThreads * sizeof(Raw)),
                      reinterpret_cast<const Copied*>(ahead + c * step), columns >> c & 1);
    }
  }

  // Requests a row. All are requested in order.
  __device__ __forceinline__ void ask(int row) {
    if (has(row)) {
      if constexpr (kPlanes) {
#pragma unroll
        for (int c = 0; c < kWindow; ++c) {
          next[c] = columns >> c & 1 ? reinterpret_cast<const Raw*>(ahead)[c] : Raw{};
        }
      } else {
        const int32_t into = to + row % kDepth * static_cast<int>(sizeof(shared.row[0]));
        if (is_wide) {
          copy<Wide>(into);
        } else {
          copy<Narrow>(into);
        }
      }
    }
    ahead += pitch;
  }

  __device__ __forceinline__ void read(int row, Raw (&raw)[kWindow]) const {
#pragma unroll
    for (int c = 0; c < kWindow; ++c) {
      raw[c] = kPlanes ? next[c] : shared.row[row % kDepth][c][slot];
    }
  }
};

// Copies the weights of a block's channels, reversed if `turned`. Called by all of its threads.
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

// Waits for the oldest row in flight, which all lanes of the item then may read.
template <class R>
__device__ __forceinline__ void wait_for_row(const R& rows) {
  ptx::copy_async_wait_for_groups<kDepth - 2>();
  rows.meet();
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

// Requests the first rows.
template <class R>
__device__ __forceinline__ void begin(R& rows) {
  if constexpr (R::kPlanes) {
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
  if constexpr (R::kPlanes) {
    rows.read(row, raw);
    rows.ask(row + 1);
  } else {
    wait_for_row(rows);
    if (found) rows.read(row, raw);
    rows.ask(row + kDepth - 1);
    ptx::copy_async_commit();
  }
  widen(raw, pixel);
  return found;
}

}  // namespace fx_fuser::depthwise
