// Arguments of the kernels of head_loss.cuh.
#pragma once

#include <cstdint>

namespace fx_fuser {

constexpr int kHeadLossThreads = 256;
constexpr int kHeadLossInFlight = 4;  // 16-byte vectors that a thread has in flight

// Per row, where the logits are kept for the gradient's launch: the largest logit, and the sum of
// exp(logit - largest).
struct alignas(8) RowSums {
  float largest;
  float sum;
};

// The pointwise part between a logit z and the value v that softmax gets: v = before z, or, with a
// soft cap, v = after tanh(before z). smoothing: label smoothing, the share of a row's loss that is
// the mean over its columns.
struct LogitTail {
  float before;
  float after;  // 0: no cap
  float smoothing;
};

struct HeadLossArgs {
  const void* logits;  // [rows, pitch]
  void* gradient;      // [rows, gradient_pitch], each row aligned to 16 bytes; or the logits
  RowSums* sums;       // [rows]
  // Factor of the gradients. Gradients in the logits' place: one scalar, or null to write only the
  // losses. Gradients by a launch of their own: one per row.
  const float* scale;
  const float* hot;       // [rows], with kept logits: added to the label's softmax gradient
  const int64_t* labels;  // [rows]
  float* losses;          // [rows]
  int64_t pitch;
  int64_t ignore_index;
  int32_t gradient_pitch;
  int32_t columns;
  LogitTail tail;
};

}  // namespace fx_fuser
