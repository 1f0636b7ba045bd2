// What the host tells the kernel of head_loss.cuh.
#pragma once

#include <cstdint>

namespace fx_fuser {

constexpr int kHeadLossThreads = 256;
constexpr int kHeadLossInFlight = 4;  // vectors of 16 bytes that a thread has under way

struct HeadLossArgs {
  void* logits;           // [rows, pitch], each row aligned to 16 bytes
  const float* scale;     // of the gradient; null: the logits stay
  const int64_t* labels;  // [rows]
  float* losses;          // [rows]
  int64_t pitch;          // of a row
  int64_t ignore_index;
  int32_t columns;
  int32_t vectors;  // of 16 bytes, of a pitch
};

}  // namespace fx_fuser
