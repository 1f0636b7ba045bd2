// Layouts of images [N, C, H, W].
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "host/device.h"

namespace fx_fuser {
namespace {

// As in torch (c10/core/MemoryFormat.h): true for tensors with gaps too, and false for those that
// are both contiguous and channels_last.
bool suggests_channels_last(const Tensor& image) {
  int64_t least = 0;
  for (const int d : {1, 3, 2, 0}) {
    if (image.size(d) == 0 || image.stride(d) < least || image.stride(1) == 0) return false;
    if (d == 0 && least == image.stride(1)) return false;
    least = image.stride(d) * std::max<int64_t>(image.size(d), 1);
  }
  return true;
}

using ImageSize = std::array<int64_t, 4>;

ImageSize channels_last_strides(const ImageSize& size) {
  return {size[1] * size[2] * size[3], 1, size[3] * size[1], size[1]};
}

bool is_dense_channels_last(const Tensor& image) {
  const auto strides =
      channels_last_strides({image.size(0), image.size(1), image.size(2), image.size(3)});
  for (int d = 0; d < 4; ++d) {
    if (image.size(d) != 1 && image.stride(d) != strides[d]) return false;
  }
  return true;
}

// A new tensor on `like`'s device.
Tensor new_image(const Tensor& like, const ImageSize& size, ScalarType type, bool channels_last) {
  if (!channels_last) return new_dense(like, {size.begin(), size.end()}, type);
  return new_strided(like, size.data(), channels_last_strides(size).data(), size.size(), type);
}

// True if the operand is one number per channel, or a single number.
bool is_per_channel(const Tensor& operand) {
  const int64_t rank = operand.dim();
  for (int64_t d = 0; d < rank; ++d) {
    if (rank - d != 3 && operand.size(d) != 1) return false;
  }
  return rank <= 4;
}

// True if the result can be stored in whole vectors: 16 bytes of a pixel's channels if they are
// innermost, else 8 bytes of a row.
bool takes_vectors(const Tensor& result, bool channels_last) {
  const int64_t width = channels_last ? 16 / result.element_size() : 8 / result.element_size();
  const int64_t bytes = width * result.element_size();
  return result.size(channels_last ? 1 : 3) % width == 0 &&
         reinterpret_cast<uintptr_t>(result.data_ptr()) % bytes == 0;
}

}  // namespace
}  // namespace fx_fuser
