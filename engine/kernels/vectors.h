// Vectors of float32, as wide as the processor has them, and the one function of them that libm does not offer.
#pragma once

#include <cstdint>
#include <cstring>

namespace dspark {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif
typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef float VecU __attribute__((vector_size(kLanes * 4), aligned(4)));
typedef uint32_t Word __attribute__((vector_size(kLanes * 4)));
typedef uint32_t WordU __attribute__((vector_size(kLanes * 4), aligned(4)));

inline Vec load(const float* p) { return *reinterpret_cast<const VecU*>(p); }
inline void store(float* p, Vec v) { *reinterpret_cast<VecU*>(p) = v; }

inline float sum_of(Vec v) {
  float sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += v[i];
  return sum;
}

// e^x for x <= 0, to about 1 unit in the last place: 2^n * p(r) with r in [-ln2/2, ln2/2]. NaN gives NaN.
inline Vec exponential(Vec x) {
  const Vec floor_at = Vec{} - 87.0f;
  x = x < floor_at ? floor_at : x;
  const Vec scaled = x * 1.44269504089f - 0.5f;
  typedef int32_t Int __attribute__((vector_size(kLanes * 4)));
  const Int n = __builtin_convertvector(scaled, Int);  // truncation rounds x / ln2 to the nearest for x <= 0
  const Vec nf = __builtin_convertvector(n, Vec);
  const Vec r = (x - nf * 0.693359375f) + nf * 2.12194440e-4f;
  Vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const Int bits = (n + 127) << 23;
  Vec power;
  std::memcpy(&power, &bits, sizeof(power));
  return p * power;
}

}  // namespace dspark
