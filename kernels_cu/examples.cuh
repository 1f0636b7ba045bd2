// Epilogues for the tests, the benchmarks and `python -m fx_fuser.build --all-archs`. The ones
// users run are generated from their patterns.
#pragma once

#include "epilogue_math.cuh"

namespace fx_fuser::examples {

// z * sigmoid(z) * s
struct Swish {
  template <class Acc>
  __device__ Acc operator()(const Acc (&in)[1], const Acc (&scalar)[1]) const {
    return in[0] * math::sigmoid(in[0]) * scalar[0];
  }
};

// sigmoid(z) * s + z
struct Residual {
  template <class Acc>
  __device__ Acc operator()(const Acc (&in)[1], const Acc (&scalar)[1]) const {
    return math::sigmoid(in[0]) * scalar[0] + in[0];
  }
};

// The value itself.
struct Identity {
  template <class Acc>
  __device__ Acc operator()(const Acc (&in)[1], const Acc (&)[1]) const {
    return in[0];
  }
};

// z * a * b * s
struct Scaled {
  template <class Acc>
  __device__ Acc operator()(const Acc (&in)[3], const Acc (&scalar)[1]) const {
    return in[0] * in[1] * in[2] * scalar[0];
  }
};

// silu(z) * y
struct SiluMul {
  template <class Acc>
  __device__ Acc operator()(const Acc (&in)[2], const Acc (&)[1]) const {
    return math::silu(in[0]) * in[1];
  }
};

// z * sigmoid(z) * a + b * c - s
struct ThreeOperands {
  template <class Acc>
  __device__ Acc operator()(const Acc (&in)[4], const Acc (&scalar)[1]) const {
    return in[0] * math::sigmoid(in[0]) * in[1] + in[2] * in[3] - scalar[0];
  }
};

// mask * sigmoid(z) * y
struct Gate {
  template <class Acc>
  __device__ Acc operator()(const Acc (&in)[3], const Acc (&)[1]) const {
    return in[1] * math::sigmoid(in[0]) * in[2];
  }
};

// ((z - mean) * rsqrt(var + eps) * gamma + beta) * s, with in = {z, mean, var, gamma, beta, s}
struct BatchNormMul {
  template <class Acc>
  __device__ Acc operator()(const Acc (&in)[6], const Acc (&scalar)[1]) const {
    const Acc normalised = (in[0] - in[1]) * math::rsqrt(in[2] + scalar[0]);
    return (normalised * in[3] + in[4]) * in[5];
  }
};

// Every function of epilogue_math.cuh at least once.
struct EveryFunction {
  template <class Acc>
  __device__ Acc operator()(const Acc (&in)[2], const Acc (&scalar)[2]) const {
    const Acc z = in[0];
    const Acc y = in[1];
    const Acc positive = math::abs(z) + math::exp(-math::abs(y)) + scalar[1];
    const Acc bounded = math::silu(z) + math::tanh(y) + math::relu(z) + math::erf(y);
    const Acc roots = math::sqrt(positive) + math::rsqrt(positive) + math::log(positive);
    const Acc smooth = math::gelu(z) + math::gelu_tanh(y) + math::softplus(z, scalar[1], Acc(20));
    const Acc selected = math::where(math::relu(z), math::minimum(z, y), math::maximum(z, y));
    const Acc powers = math::pow(positive, Acc(2)) + math::pow(positive, scalar[0]);
    return math::round_to<__nv_bfloat16>(math::clamp(bounded + roots, Acc(-8), Acc(8))) +
           math::round_to<__half>(smooth) + selected + powers + math::sigmoid(z);
  }
};

}  // namespace fx_fuser::examples
