// Arguments of the 1 x 1 convolution between BatchNorms in training, pixels_sm90.cuh.
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
  // Of the result's tile, and of tiles of as many operands more.
  constexpr int out_bytes(int more) const {
    return (1 + more) * 2 * pixels * consumer_channels() * 2;
  }
  constexpr int stages(int more) const { return (224 * 1024 - out_bytes(more)) / stage_bytes(); }
  constexpr int shared_bytes(int more) const {
    return stages(more) * (stage_bytes() + 3 * 8 /*barriers*/) + out_bytes(more) + 2 * 8;
  }
};

// Kernel fx_fuser_pixels_<i> has shape kPixelsShapes[i].
constexpr int kPixelsShapeCount = 4;
constexpr PixelsShape kPixelsShapes[] = {{128, 2, false}, {128, 2, true}, {256, 1, true},
                                         {256, 1, false}, {64, 2, true},  {128, 1, true},
                                         {64, 2, false}};
constexpr int kPixelsThreads = 384;
constexpr int kPixelsStep = 64;  // of k in a stage, of 16 bits

// What BatchNorm does to a channel: (z - mean) · rstd · gamma + beta = z · scale + shift.
struct PixelsNorm {
  float mean;
  float rstd;
  float scale;
  float shift;
};

// How tiles are divided. Workers are blocks, or consumers that take turns. Each has neighbouring
// tiles, pixels fastest.
struct PixelsCut {
  int32_t pixel_tiles;
  int32_t tiles;
  int32_t workers;  // no more than tiles
  int32_t slots;    // no fewer than the workers of any tile of channels
};

struct PixelsArgs {
  TensorMap weight_map;    // [channels, k]
  TensorMap x_map;         // [pixels, k]
  TensorMap z_map;         // [pixels, channels], for backward's sums
  TensorMap out_map;       // [pixels, channels]
  TensorMap addend_map;    // [pixels, channels], what is added to dy
  TensorMap y_map;         // [pixels, channels], whose sign is relu's
  const PixelsNorm* load;  // [k], of x
  const PixelsNorm* norm;  // [channels], of z
  void* partial;           // [channels, slots] moments, or pairs of sums
  int32_t pixels;
  int32_t channels;
  int32_t k;
  PixelsCut cut;
};

constexpr int kPixelsCombineThreads = 256;  // a warp for each channel

struct PixelsCombineArgs {
  const void* partial;
  const PixelsNorm* norm;  // of z, for backward's sums
  float* first;            // [channels]: means, or sums of dy
  float* second;           // biased variances, or sums of dy · x̂
  int32_t channels;
  int32_t tile_channels;
  PixelsCut cut;
};

}  // namespace fx_fuser
