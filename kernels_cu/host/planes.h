// fp32 products by the library's 16-bit gemm, from planes in fp16: what graphs call. What planes
// are: linear/linear_planes_args.h.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "host/kernel.h"
#include "host/linear.h"
#include "host/split_fallback.h"
#include "host/split_operands.h"
#include "linear/linear_planes_args.h"

namespace fx_fuser {
namespace {

struct PlaneKernels {
  Kernel largest;
  Kernel convert;
  Kernel repair;
  std::unique_ptr<Fallback> precision;  // to the library's own fp32 gemm
  int64_t multiprocessors;
};

int64_t load_planes(const Sources& from) {
  const Library own = load_library(from.cubins.at(0));
  auto kernels = std::make_unique<PlaneKernels>();
  kernels->largest = get_kernel(own, "fx_fuser_plane_largest");
  kernels->convert = get_kernel(own, "fx_fuser_plane_convert");
  kernels->repair = get_kernel(own, "fx_fuser_planes_repair");
  kernels->precision = std::make_unique<Fallback>();
  kernels->multiprocessors = multiprocessors_of(from.device);
  return keep<PlaneKernels>(from, std::move(kernels));
}
const AddLoader kPlanesLoader("planes", load_planes);

// ---- a plane ------------------------------------------------------------------------------------

constexpr int64_t kPlaneFactWords = sizeof(PlaneFacts) / 4;

// An fp32 tensor as lines in memory, and the strides of its plane, whose lines are whole vectors.
struct PlaneSource {
  const float* data;
  int64_t lines = 1;
  int64_t length;     // of a line, whose elements are adjacent
  int64_t pitch = 0;  // to the next line
  std::vector<int64_t> made_strides;

  // order: dimensions, that of adjacent elements first.
  static PlaneSource of(const Tensor& tensor, const std::vector<int64_t>& order) {
    STD_TORCH_CHECK(tensor.scalar_type() == ScalarType::Float, "fx_fuser: a plane is made of fp32");
    const auto rank = static_cast<size_t>(tensor.dim());
    STD_TORCH_CHECK(rank > 0 && order.size() == rank, "fx_fuser: ", to_string(order),
                    " is no order of the dimensions of ", to_string(tensor.sizes()));
    PlaneSource made;
    made.data = static_cast<const float*>(tensor.data_ptr());
    made.length = tensor.size(order[0]);
    made.made_strides.resize(rank);
    made.made_strides[order[0]] = 1;
    bool lies = stride_along(tensor, order[0]) == 1;
    int64_t expected = 0;  // stride of the next dimension
    for (size_t i = 1; i < rank; ++i) {
      const int64_t size = tensor.size(order[i]);
      made.made_strides[order[i]] = made.lines * made.made_pitch();
      if (size != 1) {
        const int64_t stride = tensor.stride(order[i]);
        if (expected == 0) made.pitch = stride;
        lies = lies && stride > 0 && (expected == 0 || stride == expected);
        expected = stride * size;
      }
      made.lines *= size;
    }
    STD_TORCH_CHECK(lies, "fx_fuser: ", to_string(tensor.sizes()), " of strides ",
                    to_string(tensor.strides()), " is no lines, inner first ", to_string(order));
    STD_TORCH_CHECK(made.lines * made.octets() < std::numeric_limits<int32_t>::max() - (1 << 24),
                    "fx_fuser: ", to_string(tensor.sizes()), " is too large for a plane");
    return made;
  }

  int64_t octets() const { return ceil_div(length, kPlaneWidth); }  // of a line
  int64_t made_pitch() const { return octets() * kPlaneWidth; }
};

PlaneArgs plane_args(const PlaneSource& from, void* to, PlaneFacts* facts) {
  PlaneArgs args{};
  args.from = from.data;
  args.to = to;
  args.facts = facts;
  args.largest = facts->largest;
  args.pitch = from.pitch;
  args.columns = from.length;
  args.octets = make_divisor(static_cast<uint32_t>(from.octets()));
  args.count = static_cast<uint32_t>(from.lines * from.octets());
  args.vectors = is_aligned(from.data) && (from.lines == 1 || from.pitch % 4 == 0);
  return args;
}

int64_t plane_blocks(const PlaneKernels& kernels, const PlaneArgs& args) {
  constexpr int64_t kBlocksAtOnce = 4;  // that a multiprocessor has registers for
  const int64_t most = std::min<int64_t>(kBlocksAtOnce * kernels.multiprocessors, kPlaneMostBlocks);
  return std::min(most, ceil_div(args.count, kPlaneThreads * kPlaneInFlight));
}

// known: what the tensor's largest finite value is the largest of.
void launch_plane(const PlaneKernels& kernels, const PlaneSource& from, void* to, PlaneFacts* facts,
                  const std::optional<Tensor>& known, Stream stream) {
  constexpr int64_t kMostKnown = 4096;  // each block reads all
  PlaneArgs args = plane_args(from, to, facts);
  const auto look_for_it = [&](const PlaneArgs& in) {
    args.largest_count = static_cast<int32_t>(plane_blocks(kernels, in));
    launch(kernels.largest, args.largest_count, kPlaneThreads, stream, in);
  };
  if (!known) {
    look_for_it(args);
  } else if (known->numel() > kMostKnown) {
    const PlaneSource line{static_cast<const float*>(known->data_ptr()), 1, known->numel(), 0, {}};
    look_for_it(plane_args(line, nullptr, facts));
  } else {
    args.largest = static_cast<const float*>(known->data_ptr());
    args.largest_count = static_cast<int32_t>(known->numel());
  }
  launch(kernels.convert, plane_blocks(kernels, args), kPlaneThreads, stream, args);
}

// fx_fuser::plane on CUDA: values, of the tensor's sizes, and their facts.
std::tuple<Tensor, Tensor> plane(const Tensor& tensor, const std::optional<Tensor>& largest,
                                 const std::vector<int64_t>& order, const std::string& kernel) {
  require_cuda(tensor, "the tensor");
  const int device = tensor.get_device_index();
  const auto& kernels = registry<PlaneKernels>().at(kernel, device);
  const PlaneSource from = PlaneSource::of(tensor, order);
  if (largest) {
    require_cuda(*largest, "the largest values");
    STD_TORCH_CHECK(largest->scalar_type() == ScalarType::Float && largest->is_contiguous() &&
                        largest->numel() > 0,
                    "fx_fuser: the largest values are fp32, contiguous and some");
  }
  const Tensor values = new_dense(tensor, {from.lines * from.made_pitch()}, ScalarType::Half);
  const Tensor facts = new_dense(tensor, {kPlaneFactWords}, ScalarType::Int);
  if (tensor.numel() > 0) {
    const OnDevice on_device(device);
    launch_plane(kernels, from, values.data_ptr(), static_cast<PlaneFacts*>(facts.data_ptr()),
                 largest, current_stream(device));
  }
  AtenTensorHandle shaped = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(
      values.get(), tensor.dim(), tensor.sizes().data(), from.made_strides.data(), 0, &shaped));
  return {Tensor(shaped), facts};
}

// ---- a product ----------------------------------------------------------------------------------

// a b, [*, m, k] by [*, k, n]. out: another type than theirs. Nothing where torch refuses that, as
// it does while fp16 sums are allowed.
std::optional<Tensor> library_gemm(const Tensor& a, const Tensor& b,
                                   std::optional<ScalarType> out = {}) {
  std::array<StableIValue, 3> stack{torch::stable::detail::from(a), torch::stable::detail::from(b)};
  if (out) stack[2] = torch::stable::detail::from(*out);
  const char* name = a.dim() == 2 ? "aten::mm" : "aten::bmm";
  const auto failed =
      torch_call_dispatcher(name, out ? "dtype" : "", stack.data(), TORCH_ABI_VERSION);
  if (failed != AOTI_TORCH_SUCCESS) return std::nullopt;
  return torch::stable::detail::to<Tensor>(stack[0]);
}

RepairFactor repair_factor(const Tensor& tensor, int64_t line, int64_t k) {
  const int64_t batch = tensor.dim() > 2 && tensor.size(0) > 1 ? tensor.stride(0) : 0;
  return {static_cast<const float*>(tensor.data_ptr()), batch, tensor.stride(line),
          tensor.stride(k)};
}

// Repairs that a warp may make before the library is the faster way: a tenth of its gemm's time.
int64_t bearable_repairs(const PlaneKernels& kernels, const PlanesRepairArgs& args) {
  constexpr int64_t kProductsInTf32 = 1024;  // a cycle of a multiprocessor
  constexpr int64_t kCyclesOfK = 20;         // of a warp, for a repair
  const int64_t results = int64_t{args.batches} * args.m * args.n;
  const int64_t cycles = results / kernels.multiprocessors * args.k / kProductsInTf32;
  return 1 + cycles / 10 / (kCyclesOfK * std::max(args.k, 1));
}

// fx_fuser::planes_product on CUDA: a b in fp32 with both planes' scales in it, as exact as TF32,
// and two factors that take these away. a_values, b_values: of the planes, seen as a and b are.
std::tuple<Tensor, Tensor> planes_product(const Tensor& a, const Tensor& b, const Tensor& a_values,
                                          const Tensor& b_values, const Tensor& a_facts,
                                          const Tensor& b_facts, const std::string& kernel) {
  require_cuda(a, "a");
  const int device = a.get_device_index();
  const auto& kernels = registry<PlaneKernels>().at(kernel, device);
  const int64_t rank = a.dim();
  STD_TORCH_CHECK((rank == 2 || rank == 3) && b.dim() == rank && a.size(-1) == b.size(-2) &&
                      (rank == 2 || a.size(0) == b.size(0)),
                  "fx_fuser: ", to_string(a.sizes()), " has no product with ",
                  to_string(b.sizes()));
  for (const Tensor* facts : {&a_facts, &b_facts}) {
    STD_TORCH_CHECK(facts->scalar_type() == ScalarType::Int && facts->numel() == kPlaneFactWords,
                    "fx_fuser: a plane's facts are ", kPlaneFactWords, " int32");
  }
  const Fallback::Sizes sizes{a.numel() / std::max<int64_t>(a.size(-1), 1), b.size(-1), a.size(-1)};
  const bool is_empty = a.numel() == 0 || b.numel() == 0;
  std::optional<Tensor> sums;
  if (!is_empty && !kernels.precision->takes_call(sizes)) {
    sums = library_gemm(a_values, b_values, ScalarType::Float);
  }
  PlanesRepairArgs args{};
  if (sums) {
    args.a_facts = static_cast<const PlaneFacts*>(a_facts.data_ptr());
    args.b_facts = static_cast<const PlaneFacts*>(b_facts.data_ptr());
  } else {
    sums = library_gemm(a, b);
    STD_TORCH_CHECK(sums, "fx_fuser: the library's product of ", to_string(a.sizes()), " and ",
                    to_string(b.sizes()), " failed");
  }
  STD_TORCH_CHECK(sums->is_contiguous(), "fx_fuser: the library's product is not row-major");
  const Tensor factors = new_dense(a, {2}, ScalarType::Float);
  args.sums = static_cast<float*>(sums->data_ptr());
  args.factors = static_cast<float*>(factors.data_ptr());
  args.a = repair_factor(a, rank - 2, rank - 1);
  args.b = repair_factor(b, rank - 1, rank - 2);
  args.m = static_cast<int32_t>(a.size(-2));
  args.n = static_cast<int32_t>(b.size(-1));
  args.k = static_cast<int32_t>(a.size(-1));
  const int64_t batches = rank == 3 ? a.size(0) : 1;
  const int64_t pairs = ceil_div(args.m, 2);
  const int64_t strips = ceil_div(args.n, kRepairStrip);
  STD_TORCH_CHECK(batches * pairs * strips < std::numeric_limits<int32_t>::max() - (1 << 24),
                  "fx_fuser: a product of ", to_string(a.sizes()), " and ", to_string(b.sizes()),
                  " is too large");
  args.batches = static_cast<uint32_t>(batches);
  args.pairs = make_divisor(static_cast<uint32_t>(std::max<int64_t>(pairs, 1)));
  args.strips = make_divisor(static_cast<uint32_t>(std::max<int64_t>(strips, 1)));
  args.least_sum = kLeastPlanesSum * std::sqrt(static_cast<float>(args.k));
  args.bearable = static_cast<int32_t>(bearable_repairs(kernels, args));
  args.precision_flag = kernels.precision->flag(sizes);
  constexpr int64_t kRepairBlocks = 2;  // a multiprocessor
  const int64_t blocks = ceil_div(batches * pairs * strips, kRepairThreads / 32);
  const OnDevice on_device(device);
  launch(kernels.repair, std::clamp<int64_t>(blocks, 1, kRepairBlocks * kernels.multiprocessors),
         kRepairThreads, current_stream(device), args);
  return {*sums, factors};
}

}  // namespace
}  // namespace fx_fuser
