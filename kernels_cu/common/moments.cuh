// Count, mean and M2 (the sum of squared deviations from the mean) of a set of values, and their
// merge for the union of two sets:
//   T. F. Chan, G. H. Golub, R. J. LeVeque, "Updating Formulae and a Pairwise Algorithm for
//   Computing Sample Variances", 1979.
#pragma once

namespace fx_fuser {

// a / b. In fp32: within two ulp if |b| < 2^126, with a fifth of the instructions of an IEEE
// division.
__device__ __forceinline__ float ratio(float a, float b) { return __fdividef(a, b); }
__device__ __forceinline__ double ratio(double a, double b) { return a / b; }

template <class Acc>
struct Moments {
  Acc count;
  Acc mean;
  Acc m2;

  __device__ __forceinline__ void merge(const Moments& other) {
    if (other.count == Acc(0)) return;
    const Acc total = count + other.count;
    // Exactly 1 if this set is empty: the mean of a constant must be exactly that constant.
    const Acc weight = count == Acc(0) ? Acc(1) : ratio(other.count, total);
    const Acc delta = other.mean - mean;
    mean += delta * weight;
    m2 += other.m2 + delta * (count * weight) * delta;
    count = total;
  }
};

}  // namespace fx_fuser
