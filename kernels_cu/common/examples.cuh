// Epilogues for the tests, the benchmarks and `python -m fx_fuser.build --all-archs`. Users'
// epilogues are generated from their models.
#pragma once

#include "common/epilogue_math.cuh"

namespace fx_fuser::examples {

// z * sigmoid(z) * s
struct Swish {
  template <class Acc>
  __device__ Acc operator()(const Acc (&in)[1], const Acc (&scalar)[1]) const {
    return math::mul(math::mul(in[0], math::sigmoid(in[0])), scalar[0]);
  }
};

// sigmoid(z) * s + z
struct Residual {
  template <class Acc>
  __device__ Acc operator()(const Acc (&in)[1], const Acc (&scalar)[1]) const {
    return math::add(math::mul(math::sigmoid(in[0]), scalar[0]), in[0]);
  }
};

// The value itself.
struct Identity {
  template <class Acc>
  __device__ Acc operator()(const Acc (&in)[1], const Acc (&)[1]) const {
    return in[0];
  }
};

// sigmoid(z)
struct Sigmoid {
  template <class Acc>
  __device__ Acc operator()(const Acc (&in)[1], const Acc (&)[1]) const {
    return math::sigmoid(in[0]);
  }
};

// z * a * b * s
struct Scaled {
  template <class Acc>
  __device__ Acc operator()(const Acc (&in)[3], const Acc (&scalar)[1]) const {
    return math::mul(math::mul(math::mul(in[0], in[1]), in[2]), scalar[0]);
  }
};

// silu(z) * y
struct SiluMul {
  template <class Acc>
  __device__ Acc operator()(const Acc (&in)[2], const Acc (&)[1]) const {
    return math::mul(math::silu(in[0]), in[1]);
  }
};

// z * sigmoid(z) * a + b * c - s
struct ThreeOperands {
  template <class Acc>
  __device__ Acc operator()(const Acc (&in)[4], const Acc (&scalar)[1]) const {
    const Acc gated = math::mul(math::mul(in[0], math::sigmoid(in[0])), in[1]);
    return math::sub(math::add(gated, math::mul(in[2], in[3])), scalar[0]);
  }
};

// mask * sigmoid(z) * y
struct Gate {
  template <class Acc>
  __device__ Acc operator()(const Acc (&in)[3], const Acc (&)[1]) const {
    return math::mul(math::mul(in[1], math::sigmoid(in[0])), in[2]);
  }
};

// ((z - mean) * rsqrt(var + eps) * gamma + beta) * s, with in = {z, mean, var, gamma, beta, s}
struct BatchNormMul {
  template <class Acc>
  __device__ Acc operator()(const Acc (&in)[6], const Acc (&scalar)[1]) const {
    const Acc scale = math::mul(math::rsqrt(math::add(in[2], scalar[0])), in[3]);
    return math::mul(math::fma(math::sub(in[0], in[1]), scale, in[4]), in[5]);
  }
};

// silu of a BatchNorm in evaluation; operands as above.
struct NormSilu {
  template <class Acc>
  __device__ Acc operator()(const Acc (&in)[5], const Acc (&scalar)[1]) const {
    const Acc scale = math::mul(math::rsqrt(math::add(in[2], scalar[0])), in[3]);
    return math::silu(math::fma(math::sub(in[0], in[1]), scale, in[4]));
  }
};

// One function of each kind from epilogue_math.cuh.
struct EveryFunction {
  template <class Acc>
  __device__ Acc operator()(const Acc (&in)[2], const Acc (&scalar)[2]) const {
    const Acc z = in[0];
    const Acc y = in[1];
    const Acc decay = math::exp(math::neg(math::abs(y)));
    const Acc positive = math::add(math::add(math::abs(z), decay), scalar[1]);
    const Acc bounded = math::add(math::add(math::silu(z), math::tanh(y)),
                                  math::addcmul(math::erf(y), math::relu(z), scalar[1], Acc(0.5)));
    const Acc roots = math::add(math::div_by_number(math::sqrt(positive), scalar[1]),
                                math::div(math::log(positive), math::rsqrt(positive)));
    const Acc smooth = math::add(math::add(math::gelu(z), math::gelu_tanh(y)),
                                 math::softplus(z, scalar[1], Acc(20)));
    const Acc selected = math::where(math::relu(z), math::minimum(z, y), math::maximum(z, y));
    const Acc powers =
        math::sub(math::pow(positive, Acc(2)), math::pow(positive, scalar[0]), Acc(-0.25));
    const Acc limited = math::clamp(math::sub(bounded, math::neg(roots)), Acc(-8), Acc(8));
    const Acc rounded =
        math::add(math::round_to<__nv_bfloat16>(limited), math::round_to<__half>(smooth));
    return math::add(math::add(math::add(rounded, selected), powers), math::sigmoid(z), Acc(3));
  }
};

}  // namespace fx_fuser::examples
