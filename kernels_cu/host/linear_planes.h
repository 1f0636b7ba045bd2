// The fp32 gemm from planes in fp16: planes, tensor maps, launch.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <optional>

#include "host/linear_dense.h"
#include "host/planes.h"
#include "linear/linear_planes_args.h"

namespace fx_fuser {
namespace {

struct LinearPlanesKernels : GemmKernel, EpilogueTypes {
  DenseChoice shapes{};
  PlaneKernels planes;
  bool along_x;  // are k of x adjacent, not its rows?
  bool along_weight;

  explicit LinearPlanesKernels(const EpilogueTypes& types) : EpilogueTypes(types) {}

  // For these sizes it was chosen by a clock; there is no model of others.
  bool is_profitable(const Tensor& /*x*/, const Tensor& /*weight*/) const override { return true; }
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
  kernels->shapes = DenseChoice::of(load_library(from.cubins.at(0)), "fx_fuser_linear_planes_",
                                    kFirstPlanesShape, kDenseShapeCount, from.device);
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

// From planes that exist. False, and nothing is launched, where the kernel does not take the
// result's or the operands' strides.
bool multiply_planes(const LinearPlanesKernels& kernels, const Plane16& x, const Plane16& weight,
                     const std::optional<Tensor>& bias, const Tensor& out,
                     const std::optional<Tensor>& z, const EpilogueArgs& epilogue, Stream stream) {
  const int64_t m = x.from.along ? x.from.lines : x.from.length;
  const int64_t n = weight.from.along ? weight.from.lines : weight.from.length;
  LinearPlanesArgs args{};
  if (!set_dense_result(args, m, n, out, z, bias, epilogue)) return false;
  const int chosen = kernels.shapes.best(m, n);
  const DenseShape& shape = kDenseShapes[chosen];
  args.weight_map = weight.map(shape.tile_n());
  args.x_map = x.map(shape.tile_m / shape.cluster);
  args.x_facts = x.facts;
  args.weight_facts = weight.facts;
  args.k = static_cast<int32_t>(x.from.along ? x.from.length : x.from.lines);
  kernels.shapes.launch_tiles(chosen, args, stream);
  return true;
}

bool run_linear_planes(const LinearPlanesKernels& kernels, const Tensor& x, const Tensor& weight,
                       const std::optional<Tensor>& bias, const Tensor& out,
                       const std::optional<Tensor>& z, const EpilogueArgs& epilogue) {
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
  return multiply_planes(kernels, left, right, bias, out, z, epilogue, stream);
}

bool LinearPlanesKernels::run(const Tensor& x, const Tensor& weight,
                              const std::optional<Tensor>& bias, const Tensor& y,
                              const std::optional<Tensor>& c, const EpilogueArgs& args) const {
  return run_linear_planes(*this, x, weight, bias, y, c, args);
}

}  // namespace
}  // namespace fx_fuser
