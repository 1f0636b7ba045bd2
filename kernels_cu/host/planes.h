// fp32 matrices to planes in fp16: which tensors, launch. What they are:
// linear/linear_planes_args.h.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>

#include "host/kernel.h"
#include "host/split_operands.h"
#include "linear/linear_planes_args.h"

namespace fx_fuser {
namespace {

struct PlaneKernels {
  Kernel largest;
  Kernel convert;
  int64_t multiprocessors;

  static PlaneKernels of(Library library, int device) {
    return {get_kernel(library, "fx_fuser_plane_largest"),
            get_kernel(library, "fx_fuser_plane_convert"), multiprocessors_of(device)};
  }
};

int64_t load_planes(const Sources& from) {
  return keep<PlaneKernels>(from, std::make_unique<PlaneKernels>(PlaneKernels::of(
                                      load_library(from.cubins.at(0)), from.device)));
}
const AddLoader kPlanesLoader("planes", load_planes);

// A matrix [rows, columns], as it lies in memory.
struct PlaneSource {
  const float* data;
  int64_t lines;
  int64_t length;  // of a line, whose elements are adjacent
  int64_t pitch;   // to the next line
  bool along;      // are columns adjacent, and lines rows?

  // Nothing where neither rows nor columns are adjacent.
  static std::optional<PlaneSource> of(const Tensor& tensor, int64_t rows, int64_t columns,
                                       int64_t row_stride) {
    const auto* data = static_cast<const float*>(tensor.data_ptr());
    const int64_t column_stride = stride_along(tensor, tensor.dim() - 1);
    if (column_stride == 1) return PlaneSource{data, rows, columns, row_stride, true};
    if (row_stride != 1 && rows > 1) return std::nullopt;
    return PlaneSource{data, columns, rows, column_stride, false};
  }

  OperandStride strides() const {  // of [rows, columns]
    return along ? OperandStride{pitch, 1} : OperandStride{1, pitch};
  }
  int64_t octets() const { return ceil_div(length, kPlaneWidth); }  // of a line
  // Elements of the plane's lines, which are whole vectors.
  int64_t made_pitch() const { return octets() * kPlaneWidth; }
  bool is_counted() const {
    return lines > 0 && length > 0 &&
           lines * octets() < std::numeric_limits<int32_t>::max() - (1 << 24);
  }
};

// Facts, then what each block finds: so many words.
constexpr int64_t kPlaneFactWords = 2 + kPlaneMostBlocks;

void launch_plane(const PlaneKernels& kernels, const PlaneSource& from, void* to, void* facts,
                  Stream stream) {
  PlaneArgs args{};
  args.from = from.data;
  args.to = to;
  args.facts = static_cast<PlaneFacts*>(facts);
  args.largest = static_cast<float*>(facts) + 2;
  args.pitch = from.pitch;
  args.columns = from.length;
  args.octets = make_divisor(static_cast<uint32_t>(from.octets()));
  args.count = static_cast<uint32_t>(from.lines * from.octets());
  args.vectors = is_aligned(from.data) && (from.lines == 1 || from.pitch % 4 == 0);
  constexpr int64_t kBlocksAtOnce = 4;  // that a multiprocessor has registers for
  const int64_t most = std::min<int64_t>(kBlocksAtOnce * kernels.multiprocessors, kPlaneMostBlocks);
  const int64_t blocks = std::min(most, ceil_div(args.count, kPlaneThreads * kPlaneInFlight));
  args.blocks = static_cast<int32_t>(blocks);
  launch(kernels.largest, blocks, kPlaneThreads, stream, args);
  launch(kernels.convert, blocks, kPlaneThreads, stream, args);
}

// plane: the matrix's lines in fp16, each of whole vectors. False, and nothing is launched, where
// neither rows nor columns are adjacent.
bool run_planes(const PlaneKernels& kernels, const Tensor& matrix, const Tensor& plane,
                const Tensor& facts) {
  require_cuda(matrix, "the matrix");
  require_cuda(plane, "the plane");
  require_cuda(facts, "the plane's facts");
  STD_TORCH_CHECK(matrix.dim() == 2 && matrix.scalar_type() == ScalarType::Float,
                  "fx_fuser: a plane is made of an fp32 matrix");
  const auto from =
      PlaneSource::of(matrix, matrix.size(0), matrix.size(1), stride_along(matrix, 0));
  if (!from || !from->is_counted()) return false;
  STD_TORCH_CHECK(plane.scalar_type() == ScalarType::Half && plane.is_contiguous() &&
                      is_aligned(plane.data_ptr()) &&
                      plane.numel() == from->lines * from->made_pitch(),
                  "fx_fuser: the plane of ", to_string(matrix.sizes()), " is no fp16 of ",
                  from->lines, " lines of ", from->made_pitch());
  STD_TORCH_CHECK(facts.scalar_type() == ScalarType::Int && facts.is_contiguous() &&
                      facts.numel() == kPlaneFactWords,
                  "fx_fuser: a plane's facts are ", kPlaneFactWords, " int32");
  const OnDevice on_device(plane.get_device_index());
  launch_plane(kernels, *from, plane.data_ptr(), facts.data_ptr(),
               current_stream(plane.get_device_index()));
  return true;
}

}  // namespace
}  // namespace fx_fuser
