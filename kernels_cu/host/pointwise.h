// The pointwise kernel: coalesces the loops over out, chooses operand modes, launches.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "host/kernel.h"
#include "pointwise/pointwise_args.h"

namespace fx_fuser {
namespace {

struct PointwiseKernels {
  Kernel small;
  Kernel u32;
  Kernel u64;
  int multiprocessors;
  int scalars;
  ScalarType out;
  std::vector<ScalarType> in;
};

int64_t load_pointwise(const Sources& from) {
  const Signature types(from);
  Library library = load_library(from.cubins.at(0));
  auto kernels = std::make_unique<PointwiseKernels>();
  kernels->multiprocessors = multiprocessors_of(from.device);
  kernels->small = get_kernel(library, "fx_fuser_pointwise_small");
  kernels->u32 = get_kernel(library, "fx_fuser_pointwise_u32");
  kernels->u64 = get_kernel(library, "fx_fuser_pointwise_u64");
  kernels->scalars = types.scalars;
  kernels->out = types.out;
  kernels->in = types.operands;
  kernels->in.insert(kernels->in.begin(), types.x);
  return keep<PointwiseKernels>(from, std::move(kernels));
}
const AddLoader kPointwiseLoader("pointwise", load_pointwise);

// out and every input as one set of loops: dimensions in out's memory order, innermost first, each
// with one stride per operand (out's last). Fixed size, since a launch should not allocate.
struct Loops {
  static constexpr int kMaxRank = 64;  // torch's own limit
  int rank = 0;
  int operands = 0;
  std::array<int64_t, kMaxRank> size;
  std::array<std::array<int64_t, kMaxRank>, kMaxInputs + 1> stride;
};

Loops loops_over(const Tensor& out, const std::vector<Tensor>& inputs) {
  const auto sizes = out.sizes();
  const auto out_strides = out.strides();
  const int rank = static_cast<int>(sizes.size());
  const int count = static_cast<int>(inputs.size());

  std::array<int, Loops::kMaxRank> order;
  int kept = 0;
  for (int d = 0; d < rank; ++d) {
    if (sizes[d] != 1) order[kept++] = d;
  }
  std::sort(order.begin(), order.begin() + kept,
            [&](int a, int b) { return out_strides[a] < out_strides[b]; });

  const bool empty = out.numel() == 0;
  Loops loops;
  loops.operands = count + 1;
  int64_t dense = 1;
  for (int k = 0; k < kept; ++k) {
    STD_TORCH_CHECK(empty || out_strides[order[k]] == dense,
                    "fx_fuser: out must be dense, but has sizes ", to_string(sizes),
                    " and strides ", to_string(out_strides));
    loops.stride[count][k] = dense;
    dense *= sizes[order[k]];
    loops.size[loops.rank++] = sizes[order[k]];
  }
  for (int i = 0; i < count; ++i) {
    const auto in_sizes = inputs[i].sizes();
    const auto in_strides = inputs[i].strides();
    const int missing = rank - static_cast<int>(in_sizes.size());  // leading dims, broadcast
    bool fits = missing >= 0;
    for (int d = missing; fits && d < rank; ++d) {
      fits = in_sizes[d - missing] == sizes[d] || in_sizes[d - missing] == 1;
    }
    STD_TORCH_CHECK(fits, "fx_fuser: input ", i, " of shape ", to_string(in_sizes),
                    " does not broadcast to out's shape ", to_string(sizes));
    for (int k = 0; k < kept; ++k) {
      const int d = order[k] - missing;
      loops.stride[i][k] = d < 0 || in_sizes[d] == 1 ? 0 : in_strides[d];
    }
  }
  return loops;
}

// Merges two neighbouring loops if every operand steps through them as through one.
void coalesce(Loops& loops) {
  int last = 0;
  for (int d = 1; d < loops.rank; ++d) {
    bool joins = true;
    for (int i = 0; joins && i < loops.operands; ++i) {
      joins = loops.stride[i][d] == loops.stride[i][last] * loops.size[last];
    }
    if (joins) {
      loops.size[last] *= loops.size[d];
      continue;
    }
    ++last;
    loops.size[last] = loops.size[d];
    for (int i = 0; i < loops.operands; ++i) loops.stride[i][last] = loops.stride[i][d];
  }
  loops.rank = last + 1;
}

int64_t highest_offset(const Loops& loops, int operand) {
  int64_t offset = 0;
  for (int d = 0; d < loops.rank; ++d) offset += (loops.size[d] - 1) * loops.stride[operand][d];
  return offset;
}

bool same_layout(const Loops& loops, int operand) {
  const auto& out = loops.stride[loops.operands - 1];
  return std::equal(out.begin(), out.begin() + loops.rank, loops.stride[operand].begin());
}

// An operand that overlaps out must have the same elements at the same addresses: then a thread
// reads only what it writes itself.
void check_overlap(const Loops& loops, int operand, const Tensor& out, const Tensor& input) {
  const auto begin = reinterpret_cast<uintptr_t>(input.data_ptr());
  const auto end = begin + (highest_offset(loops, operand) + 1) * input.element_size();
  const auto out_begin = reinterpret_cast<uintptr_t>(out.data_ptr());
  const auto out_end = out_begin + out.numel() * out.element_size();
  if (end <= out_begin || out_end <= begin) return;
  STD_TORCH_CHECK(begin == out_begin && same_layout(loops, operand) &&
                      input.element_size() == out.element_size(),
                  "fx_fuser: input ", operand,
                  " shares memory with out but not its layout; pass a copy");
}

Mode mode_of(const Loops& loops, int operand, const Tensor& input, int width) {
  const auto& stride = loops.stride[operand];
  if (stride[0] == 0) return Mode::kSplat;
  const int64_t element = input.element_size();
  const int64_t alignment = std::min<int64_t>(16, width * element);
  bool aligned = reinterpret_cast<uintptr_t>(input.data_ptr()) % alignment == 0;
  // Vectors begin at multiples of `width` in out. That is a multiple in the operand too if it has
  // out's layout; otherwise its rows must be whole vectors and begin aligned.
  if (!same_layout(loops, operand)) {
    aligned &= stride[0] == 1 && loops.size[0] % width == 0;
    for (int d = 1; d < loops.rank; ++d) aligned &= stride[d] * element % alignment == 0;
  }
  return aligned ? Mode::kVector : Mode::kStrided;
}

template <class Index>
void launch_pointwise(const PointwiseKernels& kernels, const Loops& loops, const Tensor& out,
                      const std::vector<Tensor>& inputs, const std::vector<double>& scalars,
                      Stream stream) {
  const int out_size = static_cast<int>(out.element_size());
  const int width = vector_width(out_size, static_cast<int>(inputs[0].element_size()));

  PointwiseArgs<Index> args{};
  args.out = out.data_ptr();
  args.numel = static_cast<Index>(out.numel());
  args.rank = loops.rank;
  args.out_is_aligned = reinterpret_cast<uintptr_t>(args.out) % (width * out_size) == 0;
  std::copy(scalars.begin(), scalars.end(), args.scalar);
  for (int d = 0; d < loops.rank; ++d) {
    args.dim[d] = make_divisor(static_cast<Index>(loops.size[d]));
  }
  int raw_bytes = 0;
  for (int i = 0; i < static_cast<int>(inputs.size()); ++i) {
    args.in[i] = inputs[i].data_ptr();
    args.mode[i] = mode_of(loops, i, inputs[i], width);
    for (int d = 0; d < loops.rank; ++d) {
      args.stride[i][d] = static_cast<Index>(loops.stride[i][d]);
    }
    raw_bytes += width * static_cast<int>(inputs[i].element_size());
  }
  const int vectors = vectors_in_flight(width, raw_bytes);
  const int64_t blocks = ceil_div(out.numel(), int64_t{width} * vectors * kPointwiseThreads);
  if constexpr (sizeof(Index) == 4) {
    if (blocks < kernels.multiprocessors) {
      launch(kernels.small, ceil_div(out.numel(), int64_t{width} * kSmallThreads), kSmallThreads,
             stream, args);
    } else {
      launch(kernels.u32, blocks, kPointwiseThreads, stream, args);
    }
  } else {
    launch(kernels.u64, blocks, kPointwiseThreads, stream, args);
  }
}

// Returns false, without a launch, if more than kMaxDims dimensions remain after coalescing.
bool try_pointwise(const PointwiseKernels& kernels, const Tensor& out,
                   const std::vector<Tensor>& inputs, const std::vector<double>& scalars) {
  require_cuda(out, "out");
  const int device = out.get_device_index();
  STD_TORCH_CHECK(out.scalar_type() == kernels.out, "fx_fuser: the kernel writes ",
                  toString(kernels.out), ", but out is ", toString(out.scalar_type()));
  STD_TORCH_CHECK(inputs.size() == kernels.in.size(), "fx_fuser: the kernel takes ",
                  kernels.in.size(), " inputs, not ", inputs.size());
  STD_TORCH_CHECK(static_cast<int>(scalars.size()) == kernels.scalars,
                  "fx_fuser: the kernel takes ", kernels.scalars, " scalars, not ", scalars.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    STD_TORCH_CHECK(inputs[i].is_cuda() && inputs[i].get_device_index() == device,
                    "fx_fuser: input ", i, " is not on out's device, cuda:", device);
    STD_TORCH_CHECK(inputs[i].scalar_type() == kernels.in[i], "fx_fuser: the kernel reads input ",
                    i, " as ", toString(kernels.in[i]), ", but it is ",
                    toString(inputs[i].scalar_type()));
  }

  Loops loops = loops_over(out, inputs);
  if (out.numel() == 0) return true;
  if (loops.rank == 0) {  // one element
    for (int i = 0; i < loops.operands; ++i) loops.stride[i][0] = 1;
    loops.size[loops.rank++] = 1;
  }
  coalesce(loops);
  if (loops.rank > kMaxDims) return false;

  // Indices of a grid of whole vectors exceed numel, and must stay below 2^31 too.
  constexpr int64_t kHighest = std::numeric_limits<int32_t>::max() - (1 << 16);
  bool narrow = out.numel() <= kHighest;
  for (int i = 0; i < static_cast<int>(inputs.size()); ++i) {
    check_overlap(loops, i, out, inputs[i]);
    narrow &= highest_offset(loops, i) <= kHighest;
  }

  const OnDevice on_device(device);
  const Stream stream = current_stream(device);
  if (narrow) {
    launch_pointwise<uint32_t>(kernels, loops, out, inputs, scalars, stream);
  } else {
    launch_pointwise<uint64_t>(kernels, loops, out, inputs, scalars, stream);
  }
  return true;
}

void run_pointwise(const PointwiseKernels& kernels, const Tensor& out,
                   const std::vector<Tensor>& inputs, const std::vector<double>& scalars) {
  if (try_pointwise(kernels, out, inputs, scalars)) return;
  // Copies in out's layout leave one dimension.
  std::vector<Tensor> copies;
  for (const Tensor& input : inputs) {
    Tensor copy = new_like(out, input.scalar_type());
    torch::stable::copy_(copy, input);
    copies.push_back(std::move(copy));
  }
  try_pointwise(kernels, out, copies, scalars);
}

void pointwise(int64_t handle, const Tensor& out, const std::vector<Tensor>& inputs,
               const std::vector<double>& scalars) {
  run_pointwise(*reinterpret_cast<const PointwiseKernels*>(handle), out, inputs, scalars);
}

}  // namespace
}  // namespace fx_fuser
