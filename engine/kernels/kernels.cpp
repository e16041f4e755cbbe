// Matrix products and attention for a CPU step, written so that a token's result never depends on its batch.
//
// Every output number is one chain of multiply-adds in an order fixed by the weights' layout alone: the rows
// of a batch only decide how many such chains run side by side. So the same token gives the same bits whether
// it is verified alone, with seven drafts behind it, or among thirty other requests.

#include <ATen/Parallel.h>
#include <torch/extension.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif
typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef float VecU __attribute__((vector_size(kLanes * 4), aligned(4)));
typedef uint32_t Word __attribute__((vector_size(kLanes * 4)));
typedef uint32_t WordU __attribute__((vector_size(kLanes * 4), aligned(4)));

constexpr int kPanel = 2 * kLanes;  // outputs of one panel: two vectors

inline Vec load(const float* p) { return *reinterpret_cast<const VecU*>(p); }
inline void store(float* p, Vec v) { *reinterpret_cast<VecU*>(p) = v; }

// Both vectors of one line of a panel.
inline void load_line(const float* p, Vec& w0, Vec& w1) {
  w0 = load(p);
  w1 = load(p + kLanes);
}
// bfloat16 is the upper half of a float32; a line holds outputs i and i + kLanes side by side in one word.
inline void load_line(const uint16_t* p, Vec& w0, Vec& w1) {
  const Word w = *reinterpret_cast<const WordU*>(p);
  const Word low = w << 16, high = w & 0xffff0000u;
  std::memcpy(&w0, &low, sizeof(w0));
  std::memcpy(&w1, &high, sizeof(w1));
}

// e^x for x <= 0, to about 1 unit in the last place: 2^n * p(r) with r in [-ln2/2, ln2/2].
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

// R rows of x [K] (row stride ldx) against one panel [K, kPanel] -> y [R, kPanel].
template <typename W, int R>
void panel_product(const float* x, int64_t ldx, const W* panel, int64_t K, float* y, int64_t ldy, int64_t width) {
  Vec a[R], b[R];
  for (int r = 0; r < R; ++r) a[r] = b[r] = Vec{};
  for (int64_t k = 0; k < K; ++k) {
    Vec w0, w1;
    load_line(panel + k * kPanel, w0, w1);
    if (R < 4) __builtin_prefetch(panel + k * kPanel + 2048 / sizeof(W), 0, 0);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Vec v = x[r * ldx + k] - Vec{};
      a[r] += v * w0;
      b[r] += v * w1;
    }
  }
  for (int r = 0; r < R; ++r) {
    if (width == kPanel) {
      store(y + r * ldy, a[r]);
      store(y + r * ldy + kLanes, b[r]);
    } else {
      float row[kPanel];
      store(row, a[r]);
      store(row + kLanes, b[r]);
      std::memcpy(y + r * ldy, row, width * sizeof(float));
    }
  }
}

template <typename W>
void rows_product(const float* x, int64_t T, int64_t K, const W* panel, float* y, int64_t ldy, int64_t width) {
  constexpr int R = kLanes == 16 ? 12 : 6;  // accumulators that fit the register file
  int64_t t = 0;
  for (; t + R <= T; t += R) panel_product<W, R>(x + t * K, K, panel, K, y + t * ldy, ldy, width);
  const float* xr = x + t * K;
  float* yr = y + t * ldy;
  switch (T - t) {
#define CASE(n) case n: panel_product<W, n>(xr, K, panel, K, yr, ldy, width); break;
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11)
#undef CASE
    default: break;
  }
}

template <typename W>
void product(const float* x, int64_t T, int64_t K, const W* packed, int64_t N, float* y) {
  const int64_t panels = (N + kPanel - 1) / kPanel;
  constexpr int64_t kRows = 96;  // rows that stay in the cache while a thread's panels pass over them
  at::parallel_for(0, panels, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t0 = 0; t0 < T; t0 += kRows) {
      const int64_t rows = std::min<int64_t>(kRows, T - t0);
      for (int64_t p = begin; p < end; ++p) {
        const int64_t width = std::min<int64_t>(kPanel, N - p * kPanel);
        rows_product<W>(x + t0 * K, rows, K, packed + p * K * kPanel, y + t0 * N + p * kPanel, N, width);
      }
    }
  });
}

}  // namespace

// weight [N, K] bfloat16 or float32 -> the same numbers as panels [ceil(N / P), K, P], zero-padded. A line of P
// bfloat16 holds outputs 0, L, 1, L + 1, ... (L lanes), see load_line.
torch::Tensor pack(torch::Tensor weight) {
  TORCH_CHECK(weight.dim() == 2, "pack takes a matrix, not ", weight.dim(), " dimensions");
  const int64_t N = weight.size(0), K = weight.size(1), panels = (N + kPanel - 1) / kPanel;
  auto padded = torch::zeros({panels * kPanel, K}, weight.options());
  padded.narrow(0, 0, N).copy_(weight);
  auto lines = padded.view({panels, kPanel, K}).transpose(1, 2);
  if (weight.scalar_type() != torch::kBFloat16) return lines.contiguous();
  return lines.reshape({panels, K, 2, kLanes}).transpose(2, 3).reshape({panels, K, kPanel}).contiguous();
}

// x [T, K] float32, packed panels of a [N, K] weight, optional bias [N] -> [T, N] float32.
torch::Tensor linear(torch::Tensor x, torch::Tensor packed, int64_t N, c10::optional<torch::Tensor> bias) {
  TORCH_CHECK(x.dim() == 2 && x.scalar_type() == torch::kFloat32, "x must be a float32 matrix");
  TORCH_CHECK(x.size(1) == packed.size(1), "x has ", x.size(1), " columns, the weight ", packed.size(1));
  x = x.contiguous();
  const int64_t T = x.size(0), K = x.size(1);
  auto y = torch::empty({T, N}, x.options());
  if (packed.scalar_type() == torch::kBFloat16) {
    product<uint16_t>(x.data_ptr<float>(), T, K, reinterpret_cast<const uint16_t*>(packed.data_ptr()), N,
                      y.data_ptr<float>());
  } else {
    TORCH_CHECK(packed.scalar_type() == torch::kFloat32, "weights must be bfloat16 or float32");
    product<float>(x.data_ptr<float>(), T, K, packed.data_ptr<float>(), N, y.data_ptr<float>());
  }
  if (bias.has_value()) y.add_(*bias);
  return y;
}

// Writes the keys and values [T, Hk, D] of new tokens to their places in one layer's pools.
//
// keys [pages, Hk, D, page]: within a page the positions lie side by side, so that scores of several keys are one
// vector. values [pages, Hk, page, D]. pages [S, C] int32: page of each stretch of each sequence; owner [T] int32:
// the row of `pages`; position [T] int32.
void write_kv(torch::Tensor k, torch::Tensor v, torch::Tensor keys, torch::Tensor values, torch::Tensor pages,
              torch::Tensor owner, torch::Tensor position) {
  k = k.contiguous();
  v = v.contiguous();
  const int64_t T = k.size(0), Hk = k.size(1), D = k.size(2), page = keys.size(3), C = pages.size(1);
  const float *kp = k.data_ptr<float>(), *vp = v.data_ptr<float>();
  float *ko = keys.data_ptr<float>(), *vo = values.data_ptr<float>();
  const int32_t *pp = pages.data_ptr<int32_t>(), *op = owner.data_ptr<int32_t>(), *tp = position.data_ptr<int32_t>();
  for (int64_t t = 0; t < T; ++t) {
    const int64_t where = pp[op[t] * C + tp[t] / page], offset = tp[t] % page;
    for (int64_t h = 0; h < Hk; ++h) {
      const float* from = kp + (t * Hk + h) * D;
      float* to = ko + (where * Hk + h) * D * page + offset;
      for (int64_t d = 0; d < D; ++d) to[d * page] = from[d];
      std::memcpy(vo + ((where * Hk + h) * page + offset) * D, vp + (t * Hk + h) * D, D * sizeof(float));
    }
  }
}

// Causal attention of a ragged batch over paged keys and values (layouts as in write_kv).
//
// q [T, Hq, D] -> [T, Hq, D]. A token sees positions max(0, position - window + 1) .. position (window 0: all).
// Work is split by (token, key head); the order of every sum depends on the token's own position alone.
template <int P>  // vectors in a page
void attend(const float* q, int64_t G, int64_t D, const float* keys, const float* values, const int32_t* table,
            int64_t Hk, int64_t h, int64_t first, int64_t last, float scale, float* score, float* out) {
  constexpr int64_t page = P * kLanes;
  const int64_t from = first / page, to = last / page + 1, stride = (to - from) * page;
  const float never = -std::numeric_limits<float>::infinity();
  for (int64_t c = from; c < to; ++c) {
    const float* k = keys + (table[c] * Hk + h) * D * page;
    int64_t g = 0;
    for (; g + 3 <= G; g += 3) {
      Vec sum[3][P];
      for (auto& row : sum) for (auto& x : row) x = Vec{};
      for (int64_t d = 0; d < D; ++d)
        for (int z = 0; z < 3; ++z) {
          const Vec w = q[(g + z) * D + d] - Vec{};
          for (int p = 0; p < P; ++p) sum[z][p] += w * load(k + d * page + p * kLanes);
        }
      for (int z = 0; z < 3; ++z)
        for (int p = 0; p < P; ++p) store(score + (g + z) * stride + (c - from) * page + p * kLanes, sum[z][p] * scale);
    }
    for (; g < G; ++g) {
      Vec sum[P];
      for (auto& x : sum) x = Vec{};
      for (int64_t d = 0; d < D; ++d) {
        const Vec w = q[g * D + d] - Vec{};
        for (int p = 0; p < P; ++p) sum[p] += w * load(k + d * page + p * kLanes);
      }
      for (int p = 0; p < P; ++p) store(score + g * stride + (c - from) * page + p * kLanes, sum[p] * scale);
    }
  }
  for (int64_t g = 0; g < G; ++g) {
    float* s = score + g * stride;
    for (int64_t j = 0; j < first - from * page; ++j) s[j] = never;
    for (int64_t j = last - from * page + 1; j < stride; ++j) s[j] = never;
    float top = never, sum = 0;
    for (int64_t j = 0; j < stride; ++j) top = std::max(top, s[j]);
    for (int64_t j = 0; j < stride; j += kLanes) store(s + j, exponential(load(s + j) - top));
    for (int64_t j = 0; j < first - from * page; ++j) s[j] = 0;
    for (int64_t j = last - from * page + 1; j < stride; ++j) s[j] = 0;
    for (int64_t j = 0; j < stride; ++j) sum += s[j];
    const float inverse = 1.0f / sum;
    for (int64_t j = 0; j < stride; ++j) s[j] *= inverse;
  }
  const int64_t used = last - from * page + 1;
  for (int64_t g0 = 0; g0 < G; g0 += 3)
    for (int64_t d0 = 0; d0 < D; d0 += 4 * kLanes) {
      const int64_t ng = std::min<int64_t>(3, G - g0), nd = std::min<int64_t>(4, (D - d0) / kLanes);
      Vec sum[3][4];
      for (auto& row : sum) for (auto& x : row) x = Vec{};
      for (int64_t j = first - from * page; j < used; ++j) {
        const float* v = values + ((table[from + j / page] * Hk + h) * page + j % page) * D + d0;
        if (ng == 3 && nd == 4) {
          for (int g = 0; g < 3; ++g) {
            const Vec w = score[(g0 + g) * stride + j] - Vec{};
            for (int d = 0; d < 4; ++d) sum[g][d] += w * load(v + d * kLanes);
          }
        } else {
          for (int g = 0; g < ng; ++g) {
            const Vec w = score[(g0 + g) * stride + j] - Vec{};
            for (int d = 0; d < nd; ++d) sum[g][d] += w * load(v + d * kLanes);
          }
        }
      }
      for (int g = 0; g < ng; ++g)
        for (int d = 0; d < nd; ++d) store(out + (g0 + g) * D + d0 + d * kLanes, sum[g][d]);
    }
}

torch::Tensor attention(torch::Tensor q, torch::Tensor keys, torch::Tensor values, torch::Tensor pages,
                        torch::Tensor owner, torch::Tensor position, double scale, int64_t window) {
  const int64_t T = q.size(0), Hq = q.size(1), D = q.size(2), Hk = keys.size(1), G = Hq / Hk, page = keys.size(3);
  TORCH_CHECK(D % kLanes == 0, "head size must be a multiple of ", kLanes, ", not ", D);
  TORCH_CHECK(G * Hk == Hq, Hq, " query heads cannot share ", Hk, " key heads evenly");
  TORCH_CHECK(page == 16 || page == 32, "page size must be 16 or 32, not ", page);
  q = q.contiguous();
  auto out = torch::empty_like(q);
  const float *qp = q.data_ptr<float>(), *kp = keys.data_ptr<float>(), *vp = values.data_ptr<float>();
  const int32_t *pp = pages.data_ptr<int32_t>(), *op = owner.data_ptr<int32_t>(), *tp = position.data_ptr<int32_t>();
  const int64_t C = pages.size(1);
  float* yp = out.data_ptr<float>();
  at::parallel_for(0, T * Hk, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> score;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t t = i / Hk, h = i % Hk, last = tp[t];
      const int64_t first = window > 0 ? std::max<int64_t>(0, last - window + 1) : 0;
      score.resize(G * (last / page + 1 - first / page) * page);
      const int64_t at = (t * Hq + h * G) * D;
      auto run = page == 16 ? attend<16 / kLanes> : attend<32 / kLanes>;
      run(qp + at, G, D, kp, vp, pp + op[t] * C, Hk, h, first, last, static_cast<float>(scale), score.data(), yp + at);
    }
  });
  return out;
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("pack", &pack);
  m.def("linear", &linear, py::call_guard<py::gil_scoped_release>());
  m.def("write_kv", &write_kv, py::call_guard<py::gil_scoped_release>());
  m.def("attention", &attention, py::call_guard<py::gil_scoped_release>());
}
