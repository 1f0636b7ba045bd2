// What the host tells the attention of short rows, windows, with a bias (attention_window.cuh and
// attention_window_backward.cuh), and how a block's shared memory is divided.
#pragma once

#include <cstdint>

#include "attention/attention_bias_args.h"

namespace fx_fuser {

constexpr int kWindowRows = 64;  // queries of a window, and keys, at most
constexpr int kWindowWarps = kWindowRows / 16;
constexpr int kWindowThreads = 32 * kWindowWarps;
constexpr int kWindowStages = 2;                          // windows on their way or in use
constexpr int kWindowScores = kWindowRows * kWindowRows;  // of a window

struct WindowShape {
  int d;                  // elements of a head, at most
  int forward_resident;   // blocks of a multiprocessor
  int backward_resident;  // likewise

  constexpr int tile_bytes() const { return kWindowRows * d * 2; }
  // operands: tensors that are read. matrices: of scores, in 16 bits.
  constexpr int shared_bytes(int operands, int matrices) const {
    return kWindowStages * operands * tile_bytes() + kWindowScores * (4 + 2 * matrices);
  }
  constexpr int forward_bytes() const { return shared_bytes(3, 0); }
  constexpr int backward_bytes() const { return shared_bytes(4, 2); }
};
constexpr WindowShape kWindowShapes[] = {{32, 5, 3}, {64, 3, 2}};
constexpr int kWindowShapeCount = sizeof(kWindowShapes) / sizeof(kWindowShapes[0]);

struct WindowArgs {
  BiasRows q;
  BiasRows k;
  BiasRows v;
  BiasRows d_out;
  BiasRows out;  // or dq
  BiasRows d_k;
  BiasRows d_v;
  // [period, head, query, key] of fp32: that of a batch is the one of its number modulo the period.
  const float* bias;
  int64_t bias_stride[4];
  float* d_bias;  // [chunk, period, head, query, key]; or null
  float scale;    // of the logits
  float least;    // a row's largest is at least this: -inf, or finite if rows may be hidden
  int32_t d;
  int32_t queries;
  int32_t keys;
  int32_t heads;
  int32_t period;
  int32_t shares;  // batches that share a bias
  int32_t chunk;   // of these, how many a block has
};

constexpr int kWindowSumColumns = 32;  // elements of a block of the last sum
constexpr int kWindowSumRows = 8;      // threads that share one of them

struct WindowSumArgs {
  const float* from;  // [chunks, count]
  float* to;          // [count]
  int64_t count;
  int32_t chunks;
};

}  // namespace fx_fuser
