// Arguments of the 1 x 1 convolution with the statistics of its result, pixels_sm90.cuh.
#pragma once

#include <cstdint>

#include "common/tensor_map.h"

namespace fx_fuser {

// A tile of the result: `pixels` rows of x, and 64 `subtiles` channels of each consumer. Two
// consumers have neighbouring channels of one tile, or, in turns, a tile each.
struct PixelsShape {
  int pixels;
  int subtiles;
  bool in_turns;

  constexpr int consumer_channels() const { return 64 * subtiles; }
  constexpr int tile_channels() const { return (in_turns ? 1 : 2) * consumer_channels(); }
  constexpr int stage_bytes() const { return (pixels + tile_channels()) * 128; }
  constexpr int out_bytes() const { return 2 * pixels * consumer_channels() * 2; }
  constexpr int stages() const { return (224 * 1024 - out_bytes()) / stage_bytes(); }
  constexpr int shared_bytes() const {
    return stages() * (stage_bytes() + 2 * 8 /*barriers*/) + out_bytes();
  }
};

// Kernel fx_fuser_pixels_<i> has shape kPixelsShapes[i].
constexpr int kPixelsShapeCount = 4;
constexpr PixelsShape kPixelsShapes[kPixelsShapeCount] = {
    {128, 2, false}, {128, 2, true}, {256, 1, true}, {256, 1, false}};
constexpr int kPixelsThreads = 384;
constexpr int kPixelsStep = 64;  // of k in a stage, of 16 bits

// How tiles are divided. Workers are blocks, or consumers that take turns. Each has neighbouring
// tiles, pixels fastest.
struct PixelsCut {
  int32_t pixel_tiles;
  int32_t tiles;
  int32_t workers;  // no more than tiles
  int32_t slots;    // no fewer than the workers of any tile of channels
};

struct PixelsArgs {
  TensorMap weight_map;  // [channels, k]
  TensorMap x_map;       // [pixels, k]
  TensorMap out_map;     // [pixels, channels]
  void* partial;         // [channels, slots] moments
  int32_t pixels;
  int32_t channels;
  int32_t k;
  PixelsCut cut;
};

constexpr int kPixelsCombineThreads = 256;  // a warp for each channel

struct PixelsCombineArgs {
  const void* partial;
  float* mean;      // [channels]
  float* variance;  // biased
  int32_t channels;
  int32_t tile_channels;
  PixelsCut cut;
};

}  // namespace fx_fuser
