// What the host tells a pointwise kernel. The shim fills it, pointwise.cuh reads it.
#pragma once

#include <cstdint>

#include "common/divisor.h"
#include "common/operands.h"

namespace fx_fuser {

constexpr int kMaxDims = 8;
constexpr int kPointwiseThreads = 256;
constexpr int kSmallThreads = 64;  // of a grid too small to fill the GPU with full blocks

// Vectors a thread has in flight. Eight elements a thread: with more, a grid is few long waves of
// load, then compute, then store, and Llama's gate on an H200 took 171 us where it now takes 97.
// Raw operands wait in registers, so the more operands, the fewer vectors.
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
