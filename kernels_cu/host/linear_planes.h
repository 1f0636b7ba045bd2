// The fp32 gemm from planes in fp16: planes, tensor maps, launch.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "host/linear_dense.h"
#include "host/planes.h"
#include "linear/linear_planes_args.h"

namespace fx_fuser {
namespace {

struct LinearPlanesKernels : GemmKernel, EpilogueTypes {
  DenseChoice shapes{};
  Kernel chunk;  // of k
  Kernel sum;    // of chunks
  std::array<Kernel, kDenseShapeCount> repair{};
  std::unique_ptr<Fallback> precision;  // to the library's product
  PlaneKernels planes;
  bool along_x;  // are k of x adjacent, not its rows?
  bool along_weight;

  explicit LinearPlanesKernels(const EpilogueTypes& types) : EpilogueTypes(types) {}

  // For these sizes it was chosen by a clock; there is no model of others. Data that planes do not
  // hold go to the library.
  bool is_profitable(const Tensor& x, const Tensor& weight) const override {
    return weight.dim() == 2 && !precision->takes_call(sizes_of(x, weight));
  }
  static Fallback::Sizes sizes_of(const Tensor& x, const Tensor& weight) {
    const int64_t k = std::max<int64_t>(weight.size(1), 1);
    return {x.numel() / k, weight.size(0), k};
  }
  bool run(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
           const Tensor& y, const std::optional<Tensor>& c,
           const EpilogueArgs& args) const override;
};

int64_t load_linear_planes(const Sources& from) {
  const Signature types(from, 2);
  STD_TORCH_CHECK(types.x == ScalarType::Float, "fx_fuser: planes are of fp32 matrices");
  auto kernels = std::make_unique<LinearPlanesKernels>(types);
  kernels->along_x = types.sizes[0] != 0;
  kernels->along_weight = types.sizes[1] != 0;
  kernels->planes = PlaneKernels::of(load_library(from.cubins.at(1)), from.device);
  const Library own = load_library(from.cubins.at(0));
  kernels->shapes = DenseChoice::of(own, "fx_fuser_linear_planes_", kFirstPlanesShape,
                                    kDenseShapeCount, from.device);
  const int shared_bytes = kDenseShapes[kChunksShape].shared_bytes();
  kernels->chunk = get_kernel(own, "fx_fuser_linear_planes_chunk", shared_bytes);
  kernels->sum = get_kernel(own, "fx_fuser_linear_planes_sum", shared_bytes);
  for (int i = kFirstPlanesShape; i < kDenseShapeCount; ++i) {
    kernels->repair[i] = get_kernel(own, "fx_fuser_linear_planes_repair_" + std::to_string(i));
  }
  kernels->precision = std::make_unique<Fallback>();
  return keep<GemmKernel, LinearPlanesKernels>(from, std::move(kernels));
}
const AddLoader kLinearPlanesLoader("linear_planes", load_linear_planes);

// A plane, and what it was made of.
struct Plane16 {
  PlaneSource from;
  void* values;
  PlaneFacts* facts;

  int64_t bytes() const { return 2 * from.lines * from.made_pitch(); }

  // Boxes of so many rows and 64 k.
  TensorMap map(int rows) const {
    const auto box_lines = static_cast<uint32_t>(from.along ? rows : kPlaneSpan);
    return tensor_map<2>(kMapFloat16, values,
                         {static_cast<uint64_t>(from.length), static_cast<uint64_t>(from.lines)},
                         {static_cast<uint64_t>(2 * from.made_pitch())}, {kPlaneSpan, box_lines});
  }
};

// x and the weight as planes are made of them. Nothing where the kernels do not take them.
std::optional<std::array<PlaneSource, 2>> plane_sources(const LinearPlanesKernels& kernels,
                                                        const Tensor& x, const Tensor& weight,
                                                        const Tensor& out) {
  const auto x_stride = row_stride(x, out);
  if (!x_stride) return std::nullopt;
  const int64_t k = weight.size(1);
  const auto left = PlaneSource::of(x, x.numel() / k, k, *x_stride);
  const auto right = PlaneSource::of(weight, weight.size(0), k, stride_along(weight, 0));
  if (!left || !right || !left->is_counted() || !right->is_counted()) return std::nullopt;
  if (left->along != kernels.along_x || right->along != kernels.along_weight) return std::nullopt;
  return std::array<PlaneSource, 2>{*left, *right};
}

// ---- chunks of k --------------------------------------------------------------------------------

// Roughly, cycles of a multiprocessor.
constexpr int64_t kTileCycles = 2500;  // of a tile beside its stages
constexpr int64_t kLaunchCycles = 5000;
constexpr int64_t kPartCycles = 1500;  // to add one chunk's part of a tile
constexpr int64_t kRepairCycles = 20;  // of a warp, for 16 results, times k
constexpr int64_t kLeastChunkStages = 4;
constexpr int64_t kMostPlaneChunks = 32;
constexpr int64_t kMostPartialBytes = 128 << 20;

int64_t planes_cycles(const DenseChoice& shapes, int shape, int64_t m, int64_t n, int64_t stages,
                      int64_t chunks) {
  const int64_t tiles = dense_tiles(kDenseShapes[shape], m, n);
  const int64_t rounds = ceil_div(tiles * chunks, shapes.clusters[shape]);
  return rounds * (ceil_div(stages, chunks) * kDenseShapes[shape].cycles + kTileCycles);
}

int64_t partial_bytes(int64_t m, int64_t n, int64_t chunks) {
  const DenseShape& shape = kDenseShapes[kChunksShape];
  const int64_t of_tile = int64_t{4} * shape.tile_m * shape.tile_n() * shape.cluster;
  return chunks * dense_tiles(shape, m, n) * of_tile;
}

// Stages of a chunk of k, where dividing it is modelled to gain a tenth; else all.
int64_t stages_of_chunk(const DenseChoice& shapes, int64_t m, int64_t n, int64_t stages) {
  int64_t found = stages;
  int64_t fewest = planes_cycles(shapes, shapes.best(m, n), m, n, stages, 1) * 9 / 10;
  const int64_t sums =
      ceil_div(dense_tiles(kDenseShapes[kChunksShape], m, n), shapes.clusters[kChunksShape]);
  for (int64_t chunks = 2; chunks <= kMostPlaneChunks; ++chunks) {
    const int64_t of_chunk = ceil_div(stages, chunks);
    if (of_chunk < kLeastChunkStages || partial_bytes(m, n, chunks) > kMostPartialBytes) break;
    const int64_t cycles = planes_cycles(shapes, kChunksShape, m, n, stages, chunks) +
                           kLaunchCycles + sums * (chunks * kPartCycles + kTileCycles);
    if (cycles < fewest) {
      fewest = cycles;
      found = of_chunk;
    }
  }
  return found;
}

// From planes that exist. wished_chunks: of k, or a few less; 0: as many as pay. False, and nothing
// is launched, where the kernel does not take the result's or the operands' strides.
bool multiply_planes(const LinearPlanesKernels& kernels, const Plane16& x, const Plane16& weight,
                     const std::optional<Tensor>& bias, const Tensor& out,
                     const std::optional<Tensor>& z, const EpilogueArgs& epilogue, Stream stream,
                     int64_t wished_chunks = 0) {
  const int64_t m = x.from.along ? x.from.lines : x.from.length;
  const int64_t n = weight.from.along ? weight.from.lines : weight.from.length;
  LinearPlanesArgs args{};
  if (!set_dense_result(args, m, n, out, z, bias, epilogue)) return false;
  args.k = static_cast<int32_t>(x.from.along ? x.from.length : x.from.lines);
  args.x_facts = x.facts;
  args.weight_facts = weight.facts;
  const int64_t stages = ceil_div(args.k, kPlaneSpan);
  const int64_t of_chunk = wished_chunks > 0 ? ceil_div(stages, wished_chunks)
                                             : stages_of_chunk(kernels.shapes, m, n, stages);
  args.chunks = static_cast<int32_t>(ceil_div(stages, of_chunk));
  args.chunk_k = static_cast<int32_t>(of_chunk * kPlaneSpan);
  const int chosen = args.chunks > 1 ? kChunksShape : kernels.shapes.best(m, n);
  const DenseShape& shape = kDenseShapes[chosen];
  args.weight_map = weight.map(shape.tile_n());
  args.x_map = x.map(shape.tile_m / shape.cluster);
  const int64_t doubts = dense_tiles(shape, m, n) * shape.cluster * doubts_of_tile(shape);
  const int64_t partials = args.chunks > 1 ? partial_bytes(m, n, args.chunks) / 4 : 0;
  const Tensor memory = new_dense(out, {partials + doubts}, ScalarType::Float);
  args.partial = static_cast<float*>(memory.data_ptr());
  args.doubted = reinterpret_cast<uint32_t*>(args.partial + partials);
  args.precision_flag = kernels.precision->flag({m, n, args.k});
  args.x = x.from.data;
  args.weight = weight.from.data;
  args.x_stride = x.from.strides();
  args.weight_stride = weight.from.strides();
  args.least_sum = kLeastPlanesSum * std::sqrt(static_cast<float>(args.k));
  const int64_t cycles = planes_cycles(kernels.shapes, chosen, m, n, stages, args.chunks);
  args.bearable = static_cast<int32_t>(1 + cycles / 10 / (kRepairCycles * args.k));
  if (args.chunks == 1) {
    kernels.shapes.launch_tiles(chosen, kernels.shapes.kernel[chosen], 1, args, stream);
  } else {
    kernels.shapes.launch_tiles(chosen, kernels.chunk, args.chunks, args, stream);
    kernels.shapes.launch_tiles(chosen, kernels.sum, 1, args, stream);
  }
  constexpr int64_t kRepairBlocks = 2;  // a multiprocessor
  const int64_t blocks =
      std::min(ceil_div(doubts, kRepairThreads), kRepairBlocks * kernels.planes.multiprocessors);
  launch(kernels.repair[chosen], blocks, kRepairThreads, stream, args);
  return true;
}

bool run_linear_planes(const LinearPlanesKernels& kernels, const Tensor& x, const Tensor& weight,
                       const std::optional<Tensor>& bias, const Tensor& out,
                       const std::optional<Tensor>& z, const EpilogueArgs& epilogue,
                       int64_t wished_chunks = 0) {
  check_linear(kernels, ScalarType::Float, {ScalarType::Float, ScalarType::Float}, x, weight, bias,
               out, z, epilogue);
  if (weight.dim() != 2 || weight.size(1) == 0) return false;
  if (out.numel() == 0) return true;
  const auto sources = plane_sources(kernels, x, weight, out);
  if (!sources) return false;

  const OnDevice on_device(out.get_device_index());
  const Stream stream = current_stream(out.get_device_index());
  constexpr int64_t kFactBytes = kPlaneFactWords * 4;
  Plane16 left{(*sources)[0], nullptr, nullptr};
  Plane16 right{(*sources)[1], nullptr, nullptr};
  // Planes are whole vectors of 16 bytes, and come first.
  const Tensor memory =
      new_dense(x, {left.bytes() + right.bytes() + 2 * kFactBytes}, ScalarType::Byte);
  auto* start = static_cast<uint8_t*>(memory.data_ptr());
  left.values = start;
  right.values = start + left.bytes();
  left.facts = reinterpret_cast<PlaneFacts*>(start + left.bytes() + right.bytes());
  right.facts = reinterpret_cast<PlaneFacts*>(start + left.bytes() + right.bytes() + kFactBytes);
  // Before anything is launched.
  LinearDenseArgs probe{};
  const int64_t m = left.from.along ? left.from.lines : left.from.length;
  if (!set_dense_result(probe, m, weight.size(0), out, z, bias, epilogue)) return false;
  launch_plane(kernels.planes, left.from, left.values, left.facts, stream);
  launch_plane(kernels.planes, right.from, right.values, right.facts, stream);
  return multiply_planes(kernels, left, right, bias, out, z, epilogue, stream, wished_chunks);
}

bool LinearPlanesKernels::run(const Tensor& x, const Tensor& weight,
                              const std::optional<Tensor>& bias, const Tensor& y,
                              const std::optional<Tensor>& c, const EpilogueArgs& args) const {
  return run_linear_planes(*this, x, weight, bias, y, c, args);
}

}  // namespace
}  // namespace fx_fuser
