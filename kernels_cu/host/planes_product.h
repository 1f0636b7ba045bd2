// Planes and the gemm from them, as ops that graphs call: several gemms may share a plane.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "host/linear.h"
#include "host/linear_planes.h"

namespace fx_fuser {
namespace {

std::optional<PlaneSource> matrix_source(const Tensor& matrix) {
  return PlaneSource::of(matrix, matrix.size(0), matrix.size(1), stride_along(matrix, 0));
}

// fx_fuser::plane on CUDA: an fp32 matrix's plane, then its facts, of fp16. Where the kernel does
// not take the matrix, what is in there does not matter: neither does the gemm's then.
Tensor plane_of(const Tensor& matrix, const std::string& kernel) {
  require_cuda(matrix, "the matrix");
  STD_TORCH_CHECK(matrix.dim() == 2 && matrix.scalar_type() == ScalarType::Float,
                  "fx_fuser: a plane is made of an fp32 matrix, not of ", to_string(matrix.sizes()),
                  " in ", toString(matrix.scalar_type()));
  const auto& kernels = registry<PlaneKernels>().at(kernel, matrix.get_device_index());
  const bool along = stride_along(matrix, 1) == 1;
  const int64_t lines = matrix.size(along ? 0 : 1);
  const int64_t octets = ceil_div(matrix.size(along ? 1 : 0), kPlaneWidth);
  const int64_t elements = lines * octets * kPlaneWidth;
  const Tensor made = new_dense(matrix, {elements + 2 * kPlaneFactWords}, ScalarType::Half);
  const auto from = matrix_source(matrix);
  if (from && from->is_counted()) {
    const int device = matrix.get_device_index();
    const OnDevice on_device(device);
    auto* values = static_cast<uint8_t*>(made.data_ptr());
    launch_plane(kernels, *from, values, values + 2 * elements, current_stream(device));
  }
  return made;
}

std::optional<Plane16> found_plane(const Tensor& matrix, const Tensor& plane) {
  const auto from = matrix_source(matrix);
  if (!from || !from->is_counted()) return std::nullopt;
  const int64_t bytes = 2 * from->lines * from->made_pitch();
  STD_TORCH_CHECK(plane.scalar_type() == ScalarType::Half && plane.is_contiguous() &&
                      is_aligned(plane.data_ptr()) &&
                      2 * plane.numel() == bytes + 4 * kPlaneFactWords,
                  "fx_fuser: no plane of a matrix of ", to_string(matrix.sizes()), " has ",
                  plane.numel(), " elements");
  auto* values = static_cast<uint8_t*>(plane.data_ptr());
  return Plane16{*from, values, reinterpret_cast<PlaneFacts*>(values + bytes)};
}

// fx_fuser::planes_product on CUDA: a bᵀ of fp32 matrices, as exact as TF32.
Tensor planes_product(const Tensor& a, const Tensor& b, const Tensor& a_plane,
                      const Tensor& b_plane, const std::string& kernel) {
  require_cuda(a, "a");
  const auto& kernels = registry<LinearPlanesKernels>().at(kernel, a.get_device_index());
  const auto by_library = [&] { return library_product(a, b, std::nullopt); };
  STD_TORCH_CHECK(a.dim() == 2 && b.dim() == 2 && a.size(1) == b.size(1),
                  "fx_fuser: ", to_string(a.sizes()), " has no product with ",
                  to_string(b.sizes()));
  if (a.numel() == 0 || b.numel() == 0 || !kernels.is_profitable(a, b)) return by_library();
  const auto left = found_plane(a, a_plane);
  const auto right = found_plane(b, b_plane);
  if (!left || !right || left->from.along != kernels.along_x ||
      right->from.along != kernels.along_weight) {
    return by_library();
  }
  const Tensor product = new_dense(a, {a.size(0), b.size(0)}, ScalarType::Float);
  const int device = a.get_device_index();
  const OnDevice on_device(device);
  const bool taken = multiply_planes(kernels, *left, *right, std::nullopt, product, std::nullopt,
                                     {}, current_stream(device));
  return taken ? product : by_library();
}

}  // namespace
}  // namespace fx_fuser
