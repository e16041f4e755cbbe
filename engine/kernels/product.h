// Products of a few rows with a packed weight.
//
// Every output number is one chain of multiply-adds in an order fixed by the weight's layout alone: the rows of a
// batch only decide how many such chains run side by side.
#pragma once

#include <torch/extension.h>

#include <algorithm>
#include <cstring>

#include "team.h"
#include "vectors.h"

namespace dspark {

constexpr int kPanel = 2 * kLanes;          // outputs of one panel: two vectors
constexpr int kRows = kLanes == 16 ? 12 : 6;  // rows of one tile: accumulators that fit the register file

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

// R rows of x [K] (row stride ldx) against Q panels side by side, each [K, kPanel] -> y [R, Q * kPanel], of which
// `width` columns are kept.
template <typename W, int R, int Q>
void tile_product(const float* x, int64_t ldx, const W* panel, int64_t K, float* y, int64_t ldy, int64_t width) {
  Vec a[Q][R], b[Q][R];
  for (int q = 0; q < Q; ++q)
    for (int r = 0; r < R; ++r) a[q][r] = b[q][r] = Vec{};
  for (int64_t k = 0; k < K; ++k) {
    Vec w0[Q], w1[Q];
    for (int q = 0; q < Q; ++q) {
      const W* line = panel + (q * K + k) * kPanel;
      load_line(line, w0[q], w1[q]);
      if (R < 4) __builtin_prefetch(line + 2048 / sizeof(W), 0, 0);
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const Vec v = x[r * ldx + k] - Vec{};
      for (int q = 0; q < Q; ++q) {
        a[q][r] += v * w0[q];
        b[q][r] += v * w1[q];
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    float row[Q * kPanel], *to = width == Q * kPanel ? y + r * ldy : row;
    for (int q = 0; q < Q; ++q) {
      store(to + q * kPanel, a[q][r]);
      store(to + q * kPanel + kLanes, b[q][r]);
    }
    if (to == row) std::memcpy(y + r * ldy, row, width * sizeof(float));
  }
}

template <typename W, int Q>
void tile(int64_t rows, const float* x, int64_t K, const W* panel, float* y, int64_t ldy, int64_t width) {
  switch (rows) {
#define CASE(n) \
  case n:       \
    if constexpr (n <= kRows / Q) tile_product<W, n, Q>(x, K, panel, K, y, ldy, width); \
    break;
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#undef CASE
    default: break;
  }
}

// One stage: x [T, K] times the panels from `first` on of a packed [N, K] weight -> their columns of y [T, ldy]; y
// points at the column where panel `first` begins.
template <typename W>
void product(Team& team, const float* x, int64_t T, int64_t K, const W* packed, int64_t N, int64_t first, float* y,
             int64_t ldy) {
  const int64_t panels = (N + kPanel - 1) / kPanel - first;
  constexpr int64_t kBlock = 96;  // rows that stay in the cache while a thread's panels pass over them
  const bool pairs = T <= kRows / 2;  // few rows: two panels at once keep the multipliers busy
  const int64_t units = pairs ? (panels + 1) / 2 : panels;
  team.stage(units, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t0 = 0; t0 < T; t0 += kBlock) {
      const int64_t rows = std::min(kBlock, T - t0), tiles = (rows + kRows - 1) / kRows;
      for (int64_t u = begin; u < end; ++u) {
        const int64_t p = first + (pairs ? 2 * u : u);
        const int64_t left = N - p * kPanel;
        const W* panel = packed + p * K * kPanel;
        float* out = y + (p - first) * kPanel;
        if (pairs && left > kPanel) {
          tile<W, 2>(rows, x + t0 * K, K, panel, out + t0 * ldy, ldy, std::min<int64_t>(2 * kPanel, left));
          continue;
        }
        for (int64_t i = 0; i < tiles; ++i) {  // tiles of equal height, or one row more
          const int64_t from = t0 + rows * i / tiles, to = t0 + rows * (i + 1) / tiles;
          tile<W, 1>(to - from, x + from * K, K, panel, out + from * ldy, ldy, std::min<int64_t>(kPanel, left));
        }
      }
    }
  });
}

// The same for a packed tensor of either type; columns from `first` on, a multiple of kPanel.
inline void product(Team& team, const float* x, int64_t T, const torch::Tensor& packed, int64_t N, float* y,
                    int64_t ldy, int64_t first = 0) {
  const int64_t K = packed.size(1);
  if (packed.scalar_type() == torch::kBFloat16) {
    product<uint16_t>(team, x, T, K, reinterpret_cast<const uint16_t*>(packed.data_ptr()), N, first / kPanel, y,
                      ldy);
  } else {
    product<float>(team, x, T, K, packed.data_ptr<float>(), N, first / kPanel, y, ldy);
  }
}

// weight [N, K] bfloat16 or float32 -> the same numbers as panels [ceil(N / P), K, P], zero-padded. A line of P
// bfloat16 holds outputs 0, L, 1, L + 1, ... (L lanes), see load_line.
inline torch::Tensor pack(torch::Tensor weight) {
  TORCH_CHECK(weight.dim() == 2, "pack takes a matrix, not ", weight.dim(), " dimensions");
  const int64_t N = weight.size(0), K = weight.size(1), panels = (N + kPanel - 1) / kPanel;
  auto padded = torch::zeros({panels * kPanel, K}, weight.options());
  padded.narrow(0, 0, N).copy_(weight);
  auto lines = padded.view({panels, kPanel, K}).transpose(1, 2);
  if (weight.scalar_type() != torch::kBFloat16) return lines.contiguous();
  return lines.reshape({panels, K, 2, kLanes}).transpose(2, 3).reshape({panels, K, kPanel}).contiguous();
}

// x [T, K] float32, packed panels of a [N, K] weight, optional bias [N] -> [T, N] float32.
inline torch::Tensor linear(torch::Tensor x, torch::Tensor packed, int64_t N, c10::optional<torch::Tensor> bias) {
  TORCH_CHECK(x.dim() == 2 && x.scalar_type() == torch::kFloat32, "x must be a float32 matrix");
  TORCH_CHECK(x.size(1) == packed.size(1), "x has ", x.size(1), " columns, the weight ", packed.size(1));
  TORCH_CHECK(packed.scalar_type() == torch::kBFloat16 || packed.scalar_type() == torch::kFloat32,
              "weights must be bfloat16 or float32");
  x = x.contiguous();
  auto y = torch::empty({x.size(0), N}, x.options());
  const float* from = x.data_ptr<float>();
  float* to = y.data_ptr<float>();
  in_team([&](Team& team) { product(team, from, x.size(0), packed, N, to, N); });
  if (bias.has_value()) y.add_(*bias);
  return y;
}

}  // namespace dspark
