// Arguments of a pointwise kernel. The shim fills them, pointwise.cuh reads them.
#pragma once

#include <cstdint>

#include "common/divisor.h"
#include "common/operands.h"

namespace fx_fuser {

constexpr int kMaxDims = 8;
constexpr int kPointwiseThreads = 256;
constexpr int kSmallThreads = 64;  // if full blocks are too few to fill the GPU

// Vectors a thread has in flight. Eight elements per thread: with more, a grid runs in few long
// waves of load, then compute, then store; Llama's gate on an H200 took 171 us instead of 97.
// Loaded operands are held in registers, so more operands mean fewer vectors.
constexpr int vectors_in_flight(int width, int raw_bytes_per_vector) {
  const int wanted = 8 / width;
  const int room = 4 * 48 / raw_bytes_per_vector;
  const int vectors = wanted < room ? wanted : room;
  return vectors < 1 ? 1 : vectors;
}

template <class Index>
struct PointwiseArgs {
  void* out;  // dense; may be the memory of in[0] with the same layout
  const void* in[kMaxInputs];
  double scalar[kMaxScalars];
  // Dimensions are in out's memory order, innermost first, coalesced over all operands.
  Divisor<Index> dim[kMaxDims];
  Index stride[kMaxInputs][kMaxDims];  // in elements; 0 where the operand is broadcast
  Index numel;
  int32_t rank;
  Mode mode[kMaxInputs];
  bool out_is_aligned;  // whole vectors may be stored at once
};

}  // namespace fx_fuser
