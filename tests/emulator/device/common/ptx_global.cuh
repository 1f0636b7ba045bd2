// Replaces kernels_cu/common/ptx_global.cuh: the same functions in C++.
#pragma once

#include <cstdint>

namespace fx_fuser::ptx {

inline float load_global(const float* from) { return *from; }
inline uint32_t load_global(const uint16_t* from) { return *from; }

inline float load_global_below(const float* from, uint32_t place, uint32_t limit) {
  return place < limit ? *from : 0.0f;
}
inline uint32_t load_global_below(const uint16_t* from, uint32_t place, uint32_t limit) {
  return place < limit ? *from : 0;
}

inline float load_global_if(bool is_there, const float* from) { return is_there ? *from : 0.0f; }
inline float2 load_global_if(bool is_there, const float2* from) {
  return is_there ? *from : float2{0, 0};
}
inline uint32_t load_global_if(bool is_there, const uint16_t* from) { return is_there ? *from : 0; }
inline uint32_t load_global_if(bool is_there, const uint32_t* from) { return is_there ? *from : 0; }

template <class T>
void store_global_if(bool is_wanted, T* to, T value) {
  if (is_wanted) *to = value;
}
inline void store_global_if(bool is_wanted, void* to, const uint4& value) {
  if (is_wanted) *static_cast<uint4*>(to) = value;
}

}  // namespace fx_fuser::ptx
