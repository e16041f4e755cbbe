// Keys and values in pages, and the attention of a ragged batch over them.
#pragma once

#include <torch/extension.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "team.h"
#include "vectors.h"

namespace dspark {

// Pages of one layer. keys [pages, Hk, D, page]: within a page the positions lie side by side, so that scores of
// several keys are one vector. values [pages, Hk, page, D].
struct Pool {
  Pool(torch::Tensor k, torch::Tensor v)
      : keys(k.data_ptr<float>()), values(v.data_ptr<float>()), heads(k.size(1)), size(k.size(2)), page(k.size(3)) {
    TORCH_CHECK(page == 16 || page == 32, "page size must be 16 or 32, not ", page);
    TORCH_CHECK(size % kLanes == 0, "head size must be a multiple of ", kLanes, ", not ", size);
  }
  float *keys, *values;
  int64_t heads, size, page;
};

// Places of T tokens. pages [S, C] int32: page of each stretch of each sequence; owner [T] int32: its row; position
// [T] int32: where a token's key is written; last [T] int32: the last position it sees.
struct Places {
  Places(torch::Tensor pages_, torch::Tensor owner_, torch::Tensor position_, torch::Tensor last_)
      : pages(pages_.data_ptr<int32_t>()), owner(owner_.data_ptr<int32_t>()), position(position_.data_ptr<int32_t>()),
        last(last_.data_ptr<int32_t>()), tokens(owner_.size(0)), columns(pages_.size(1)) {
    for (const auto& t : {pages_, owner_, position_, last_}) TORCH_CHECK(t.is_contiguous(), "places must be contiguous");
    TORCH_CHECK(position_.size(0) == tokens && last_.size(0) == tokens, "places of different lengths");
  }
  const int32_t *pages, *owner, *position, *last;
  int64_t tokens, columns;
};

// Writes key k and value v [Hk, D] of token t to their place.
inline void write_kv(const float* k, const float* v, int64_t t, const Pool& pool, const Places& at) {
  const int64_t Hk = pool.heads, D = pool.size, page = pool.page;
  const int64_t where = at.pages[at.owner[t] * at.columns + at.position[t] / page], offset = at.position[t] % page;
  for (int64_t h = 0; h < Hk; ++h) {
    float* to = pool.keys + (where * Hk + h) * D * page + offset;
    for (int64_t d = 0; d < D; ++d) to[d * page] = k[h * D + d];
    std::memcpy(pool.values + ((where * Hk + h) * page + offset) * D, v + h * D, D * sizeof(float));
  }
}

// One token's G query heads that share key head h. score: room for G x (positions of all pages touched).
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
    Vec tops = Vec{} + never, sums{};
    for (int64_t j = 0; j < stride; j += kLanes) {
      const Vec x = load(s + j);
      tops = x > tops ? x : tops;
    }
    float top = never;
    for (int i = 0; i < kLanes; ++i) top = std::max(top, tops[i]);
    for (int64_t j = 0; j < stride; j += kLanes) store(s + j, exponential(load(s + j) - top));
    for (int64_t j = 0; j < first - from * page; ++j) s[j] = 0;
    for (int64_t j = last - from * page + 1; j < stride; ++j) s[j] = 0;
    for (int64_t j = 0; j < stride; j += kLanes) sums += load(s + j);
    const float sum = sum_of(sums);
    const float inverse = 1.0f / sum;
    for (int64_t j = 0; j < stride; j += kLanes) store(s + j, load(s + j) * inverse);
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

// One stage, attention of the T tokens: q at q + t * stride, [G * Hk, D] each, -> out [T, G * Hk, D].
//
// A token sees positions max(0, last - window + 1) .. last (window 0: all up to last). Work is split by (token, key
// head); the order of every sum depends on what the token sees alone.
inline void attention(Team& team, const float* q, int64_t stride, int64_t Hq, const Pool& pool, const Places& at,
                      float scale, int64_t window, float* out) {
  const int64_t Hk = pool.heads, D = pool.size, page = pool.page, G = Hq / Hk;
  const auto run = page == kLanes ? attend<1> : page == 2 * kLanes ? attend<2> : attend<32 / kLanes>;
  team.stage(at.tokens * Hk, 1, [&](int64_t begin, int64_t end) {
    thread_local std::vector<float> score;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t t = i / Hk, h = i % Hk, last = at.last[t];
      const int64_t first = window > 0 ? std::max<int64_t>(0, last - window + 1) : 0;
      const size_t wanted = G * (last / page + 1 - first / page) * page;
      if (score.size() < wanted) score.resize(wanted);
      run(q + t * stride + h * G * D, G, D, pool.keys, pool.values, at.pages + at.owner[t] * at.columns, Hk, h, first,
          last, scale, score.data(), out + (t * Hq + h * G) * D);
    }
  });
}

}  // namespace dspark
