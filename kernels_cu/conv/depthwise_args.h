// Arguments of the depthwise convolution kernels, and the width of their strips. The shim fills
// them (host/depthwise.h), depthwise.cuh reads them.
#pragma once

#include <cstdint>

#include "common/divisor.h"
#include "common/operands.h"
#include "conv/conv_operand.h"

namespace fx_fuser {

constexpr int kDepthwiseThreads = 64;
constexpr int kDepthwiseMaxLanes = 32;  // threads along the channels
constexpr int kDepthwiseLeastWindow = 3;
constexpr int kDepthwiseMaxWindow = 7;

// Channels per thread. In a contiguous image neighbouring channels are not a vector.
constexpr int depthwise_channels(bool planes) { return planes ? 1 : 2; }

// A thread's registers for the weights, sums and row of pixels of two channels.
constexpr int depthwise_registers(int kernel_h, int kernel_w, int stride, int columns) {
  const int sums = (kernel_h + stride - 1) / stride * columns;
  return 2 * (kernel_h * kernel_w + sums + (columns - 1) * stride + kernel_w);
}

// Output columns per thread: as many as leave registers for the epilogue.
constexpr int depthwise_columns(int kernel_h, int kernel_w, int stride, int x_bytes, bool planes) {
  if (planes) return 4;
  const bool is_wide = stride == 1 && x_bytes == 2;
  if (is_wide && depthwise_registers(kernel_h, kernel_w, stride, 7) <= 150) return 7;
  return depthwise_registers(kernel_h, kernel_w, stride, 4) <= 160 ? 4 : 3;
}

// Resident blocks per multiprocessor, which bounds a thread's registers. pixels: an operand varies
// by pixel.
constexpr int depthwise_resident(int kernel_h, int kernel_w, int stride, bool planes, bool pixels) {
  const int taps = kernel_h * kernel_w;
  if (pixels) return 4;
  if (planes) return taps <= 25 ? 8 : 5;
  return taps <= 9 ? 8 : taps <= 25 && stride > 1 ? 5 : 4;
}

struct DepthwiseArgs {
  const void* x;       // [n, c, h, w], channels_last or contiguous
  const void* weight;  // [c, 1, kernel_h, kernel_w]
  void* out;           // [n, c, out_h, out_w] in x's layout
  void* c;             // the convolution itself, of x's type and out's layout, or null
  ConvOperand operand[kConvMaxOperands];
  float scalar[kMaxScalars];
  int32_t channels;
  int32_t h;
  int32_t w;
  int32_t out_h;
  int32_t out_w;
  int32_t top;
  int32_t left;
  int32_t rows;              // per item, which is one strip of output columns
  Divisor<uint32_t> strips;  // across an image
  Divisor<uint32_t> chunks;  // of rows, down an image
  uint32_t items;            // of all images
  int32_t lanes_log2;        // threads along the channels
  int32_t groups;            // of channels
};

}  // namespace fx_fuser
