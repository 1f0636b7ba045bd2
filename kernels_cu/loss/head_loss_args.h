// What the host tells the kernels of head_loss.cuh.
#pragma once

#include <cstdint>

namespace fx_fuser {

constexpr int kHeadLossThreads = 256;
constexpr int kHeadLossInFlight = 4;  // vectors of 16 bytes that a thread has under way

// Of a row of logits that stay, for its gradient: the largest, and the sum of exp(logit - largest).
struct alignas(8) RowSums {
  float largest;
  float sum;
};

// What stands between a logit z and the value v that softmax takes: v = before z, and with a soft
// cap v = after tanh(before z). smoothing: the share of a row's loss that is the mean over its
// columns.
struct LogitTail {
  float before;
  float after;  // 0: there is no cap
  float smoothing;
};

struct HeadLossArgs {
  const void* logits;     // [rows, pitch]
  void* gradient;         // [rows, gradient_pitch], each row aligned to 16 bytes; or the logits
  RowSums* sums;          // [rows]
  const float* scale;     // of gradients in place, null: the logits stay; else one a row
  const float* hot;       // one a row, where the logits stay: the label's gradient beside softmax's
  const int64_t* labels;  // [rows]
  float* losses;          // [rows]
  int64_t pitch;
  int64_t ignore_index;
  int32_t gradient_pitch;
  int32_t columns;
  LogitTail tail;
};

}  // namespace fx_fuser
