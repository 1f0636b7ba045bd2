// Arguments of the depthwise convolution's kernels and of its gradients', and the width of their
// strips. The shim fills them (host/depthwise.h, host/depthwise_gradients.h), depthwise.cuh,
// depthwise_input.cuh and depthwise_weight.cuh read them.
#pragma once

#include <cstdint>

#include "common/divisor.h"
#include "common/operands.h"
#include "conv/conv_operand.h"

namespace fx_fuser {

constexpr int kDepthwiseThreads = 64;
constexpr int kDepthwiseMaxLanes = 32;  // threads along the channels
constexpr int kDepthwiseLeastWindow = 3;
constexpr int kDepthwiseMaxWindow = 11;

// A thread's registers for the weights, sums and row of pixels of so many channels.
constexpr int depthwise_registers(int kernel_h, int kernel_w, int stride, int columns,
                                  int channels = 2) {
  const int sums = (kernel_h + stride - 1) / stride * columns;
  return channels * (kernel_h * kernel_w + sums + (columns - 1) * stride + kernel_w);
}

// Channels per thread. In a contiguous image neighbouring channels are not a vector. Of windows
// whose two channels leave registers for few columns a thread has one.
constexpr int depthwise_channels(int kernel_h, int kernel_w, int stride, int x_bytes, bool planes) {
  const int columns = x_bytes == 2 ? 4 : 3;
  return planes || depthwise_registers(kernel_h, kernel_w, stride, columns) > 165 ? 1 : 2;
}

// Output columns per thread: as many as leave registers for the epilogue.
constexpr int depthwise_columns(int kernel_h, int kernel_w, int stride, int x_bytes, bool planes) {
  if (planes) return 4;
  const int channels = depthwise_channels(kernel_h, kernel_w, stride, x_bytes, planes);
  const auto registers = [=](int columns) {
    return depthwise_registers(kernel_h, kernel_w, stride, columns, channels);
  };
  const bool is_wide = (stride == 1 && x_bytes == 2) || channels == 1;
  if (is_wide && registers(7) <= (channels == 1 ? 165 : 150)) return 7;
  if (channels == 1) return registers(5) <= 165 ? 5 : registers(4) <= 180 ? 4 : 3;
  return registers(4) <= 160 ? 4 : 3;
}

// Resident blocks per multiprocessor, which bounds a thread's registers. pixels: an operand varies
// by pixel.
constexpr int depthwise_resident(int kernel_h, int kernel_w, int stride, int x_bytes, bool planes,
                                 bool pixels) {
  const int taps = kernel_h * kernel_w;
  if (pixels) return 4;
  if (planes) return taps <= 25 ? 8 : taps <= 49 ? 5 : 4;
  if (depthwise_channels(kernel_h, kernel_w, stride, x_bytes, planes) == 1) {
    return taps <= 49 ? 6 : 4;
  }
  return taps <= 9 ? 8 : taps <= 25 && stride > 1 ? 5 : 4;
}

// How an image is divided, which all of the kernels' arguments have.
struct DepthwiseGrid {
  int32_t channels;
  int32_t h;  // of x
  int32_t w;
  int32_t out_h;  // of the convolution's result
  int32_t out_w;
  int32_t top;
  int32_t left;
  int32_t all_rows;          // that are divided
  int32_t rows;              // per item, which is one strip of columns
  Divisor<uint32_t> strips;  // across an image
  Divisor<uint32_t> chunks;  // of rows, down an image
  uint32_t items;            // of all images
  int32_t lanes_log2;        // threads along the channels
  int32_t groups;            // of channels
  int32_t wide;              // are the images' pixels multiples of 16 bytes in channels_last?
};

struct DepthwiseArgs : DepthwiseGrid {
  const void* x;       // [n, c, h, w], channels_last or contiguous
  const void* weight;  // [c, 1, kernel_h, kernel_w]
  void* out;           // [n, c, out_h, out_w] in x's layout
  void* c;             // the convolution itself, of x's type and out's layout, or null
  ConvOperand operand[kConvMaxOperands];
  float scalar[kMaxScalars];
  int32_t turned;  // is the window reversed, as the gradient of x has it?
};

// ---- the gradient of x, with stride 2 -----------------------------------------------------------

constexpr int kDepthwiseInputThreads = 64;

// A thread's registers. columns: of dz, from which twice as many of dx are made.
constexpr int depthwise_input_registers(int kernel_h, int kernel_w, int columns, int channels) {
  const int sums = (kernel_h + 1) / 2 * 2 * 2 * columns;
  return channels * (kernel_h * kernel_w + sums + columns + (kernel_w - 1) / 2);
}

constexpr int depthwise_input_channels(int kernel_h, int kernel_w) {
  return depthwise_input_registers(kernel_h, kernel_w, 4, 2) <= 150 ? 2 : 1;
}

// Columns of dz per thread.
constexpr int depthwise_input_columns(int kernel_h, int kernel_w) {
  const int channels = depthwise_input_channels(kernel_h, kernel_w);
  for (const int columns : {7, 5, 4, 3}) {
    if (depthwise_input_registers(kernel_h, kernel_w, columns, channels) <= 140) return columns;
  }
  return 2;
}

constexpr int depthwise_input_resident(int kernel_h, int kernel_w) {
  return kernel_h * kernel_w <= 49 ? 6 : 4;
}

// out_h, out_w: of dz. What is divided is dx in pairs of rows and columns.
struct DepthwiseInputArgs : DepthwiseGrid {
  const void* dz;      // [n, c, out_h, out_w], channels_last
  const void* weight;  // [c, 1, kernel_h, kernel_w]
  void* dx;            // [n, c, h, w], channels_last
};

// ---- the gradient of the weight -----------------------------------------------------------------

constexpr int kDepthwiseWeightThreads = 128;
constexpr int kDepthwiseSumLanes = 32;  // channels of a block that adds up what blocks have found
constexpr int kDepthwiseSumSlices = 8;  // of those blocks, side by side

// Resident blocks per multiprocessor: a thread has as many sums as the convolution has weights, and
// as many gradients as that has sums.
constexpr int depthwise_weight_resident(int kernel_h, int kernel_w, int stride) {
  const int registers = depthwise_registers(
      kernel_h, kernel_w, stride, depthwise_columns(kernel_h, kernel_w, stride, 2, false),
      depthwise_channels(kernel_h, kernel_w, stride, 2, false));
  return registers <= 60 ? 4 : registers <= 125 ? 3 : 2;
}

struct DepthwiseWeightArgs : DepthwiseGrid {
  const void* x;   // [n, c, h, w], channels_last
  const void* dz;  // [n, c, out_h, out_w], channels_last
  float* partial;  // [blocks of the same channels, tap, c]
};

struct DepthwiseSumArgs {
  const float* partial;
  void* dw;  // [c, 1, kernel_h, kernel_w]
  int32_t blocks;
  int32_t channels;
  int32_t groups;  // of kDepthwiseSumLanes channels
};

}  // namespace fx_fuser
