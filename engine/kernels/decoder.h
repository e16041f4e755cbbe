// All layers of a Llama-like decoder in one call: what is done between the products is too little to pay for a
// call of its own.
//
// A layer: x += out(attention(rotate(norm?(qkv(norm(x)))))); x += down(silu(gate(norm(x))) * up(norm(x))). Llama,
// Mistral and Qwen2 have no norm of queries and keys, Qwen3 has one. As in product.h, no number depends on the batch.
#pragma once

#include <torch/extension.h>

#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "attention.h"
#include "product.h"
#include "team.h"
#include "vectors.h"

namespace dspark {

// y = x / rms(x) * weight over n numbers.
inline void rms_norm(const float* x, const float* weight, float eps, int64_t n, float* y) {
  Vec squares{};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) squares += load(x + i) * load(x + i);
  float sum = sum_of(squares);
  for (; i < n; ++i) sum += x[i] * x[i];
  const float by = 1.0f / std::sqrt(sum / static_cast<float>(n) + eps);
  for (i = 0; i + kLanes <= n; i += kLanes) store(y + i, load(x + i) * by * load(weight + i));
  for (; i < n; ++i) y[i] = x[i] * by * weight[i];
}

// First half against second half, as Llama and Qwen turn a head of n numbers.
inline void rotate(float* x, const float* cosine, const float* sine, int64_t n) {
  for (int64_t i = 0; i < n / 2; ++i) {
    const float a = x[i], b = x[i + n / 2];
    x[i] = a * cosine[i] - b * sine[i];
    x[i + n / 2] = b * cosine[i] + a * sine[i];
  }
}

// y = silu(gate) * up over n numbers.
inline void gated(const float* gate, const float* up, int64_t n, float* y) {
  const auto of = [](Vec g, Vec u) {
    const Vec e = exponential(g < 0.0f ? g : -g);
    return (g < 0.0f ? g * e : g) / (e + 1.0f) * u;
  };
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(y + i, of(load(gate + i), load(up + i)));
  if (i == n) return;
  float g[kLanes] = {}, u[kLanes] = {}, out[kLanes];
  std::memcpy(g, gate + i, (n - i) * sizeof(float));
  std::memcpy(u, up + i, (n - i) * sizeof(float));
  store(out, of(load(g), load(u)));
  std::memcpy(y + i, out, (n - i) * sizeof(float));
}

struct DecoderLayer {
  torch::Tensor input_norm, qkv, qkv_bias, q_norm, k_norm, out, out_bias, post_norm, gate_up, down;
  int64_t window;
};

class Decoder {
 public:
  Decoder(int64_t hidden, int64_t inner, int64_t heads, int64_t key_heads, int64_t size, double eps, double scale)
      : hidden_(hidden), inner_(inner), heads_(heads), key_heads_(key_heads), size_(size),
        eps_(static_cast<float>(eps)), scale_(static_cast<float>(scale)) {
    TORCH_CHECK(heads % key_heads == 0, heads, " query heads cannot share ", key_heads, " key heads evenly");
    TORCH_CHECK(size % kLanes == 0, "head size must be a multiple of ", kLanes, ", not ", size);
  }

  // qkv, out, gate_up and down are packed; the others are float32, and undefined where there is none.
  void add_layer(std::map<std::string, torch::Tensor> w, int64_t window) {
    const auto get = [&](const char* name) { return w.count(name) ? w.at(name) : torch::Tensor(); };
    layers_.push_back({get("input_norm"), get("qkv"), get("qkv_bias"), get("q_norm"), get("k_norm"), get("out"),
                       get("out_bias"), get("post_norm"), get("gate_up"), get("down"), window});
  }

  // x [T, H] is overwritten by the output of the last layer. cosine, sine [T, D / 2]. Returns the outputs of the
  // layers in `wanted`, side by side: [T, len(wanted) * H].
  torch::Tensor run(torch::Tensor x, torch::Tensor cosine, torch::Tensor sine, std::vector<torch::Tensor> keys,
                    std::vector<torch::Tensor> values, torch::Tensor pages, torch::Tensor owner, torch::Tensor position,
                    torch::Tensor last, std::vector<int64_t> wanted) const {
    const int64_t T = x.size(0), H = hidden_, all = (heads_ + 2 * key_heads_) * size_;
    TORCH_CHECK(x.is_contiguous() && x.scalar_type() == torch::kFloat32 && x.size(1) == H, "x must be float32 [T, H]");
    TORCH_CHECK(cosine.is_contiguous() && sine.is_contiguous() && cosine.size(1) == size_ / 2, "angles [T, D / 2]");
    const Places at(pages, owner, position, last);
    const std::vector<Pool> pools = pools_of(keys, values);
    auto features = torch::empty({T, static_cast<int64_t>(wanted.size()) * H}, x.options());
    std::vector<float> normed(T * H), qkv(T * all), mixed(T * heads_ * size_), both(T * 2 * inner_), gate(T * inner_),
        y(T * H);
    float *xp = x.data_ptr<float>(), *fp = features.data_ptr<float>();
    const float *c = cosine.data_ptr<float>(), *s = sine.data_ptr<float>();
    in_team([&](Team& team) {
      norm_rows(team, xp, layers_[0].input_norm, T, normed.data());
      for (size_t l = 0; l < layers_.size(); ++l) {
        const DecoderLayer& w = layers_[l];
        product(team, normed.data(), T, w.qkv, all, qkv.data(), all);
        place_rows(team, w, T, qkv.data(), c, s, 0, pools[l], at);
        attention(team, qkv.data(), all, heads_, pools[l], at, scale_, w.window, mixed.data());
        product(team, mixed.data(), T, w.out, H, y.data(), H);
        add_rows(team, xp, y.data(), w.out_bias, T);
        norm_rows(team, xp, w.post_norm, T, normed.data());
        product(team, normed.data(), T, w.gate_up, 2 * inner_, both.data(), 2 * inner_);
        team.stage(T, 1, [&](int64_t begin, int64_t end) {
          for (int64_t t = begin; t < end; ++t)
            gated(&both[t * 2 * inner_], &both[t * 2 * inner_] + inner_, inner_, &gate[t * inner_]);
        });
        product(team, gate.data(), T, w.down, H, y.data(), H);
        add_rows(team, xp, y.data(), torch::Tensor(), T);
        if (l + 1 < layers_.size()) norm_rows(team, xp, layers_[l + 1].input_norm, T, normed.data());
        for (size_t i = 0; i < wanted.size(); ++i)
          if (wanted[i] == static_cast<int64_t>(l))
            team.stage(T, T, [&](int64_t begin, int64_t end) {
              for (int64_t t = begin; t < end; ++t)
                std::memcpy(fp + (t * wanted.size() + i) * H, xp + t * H, H * sizeof(float));
            });
      }
    });
    return features;
  }

  // Writes the keys and values that tokens with (already normed) inputs x [T, H] have in every layer.
  void write_context(torch::Tensor x, torch::Tensor cosine, torch::Tensor sine, std::vector<torch::Tensor> keys,
                     std::vector<torch::Tensor> values, torch::Tensor pages, torch::Tensor owner,
                     torch::Tensor position) const {
    const int64_t T = x.size(0), all = (heads_ + 2 * key_heads_) * size_, queries = heads_ * size_;
    TORCH_CHECK(x.is_contiguous() && x.scalar_type() == torch::kFloat32 && x.size(1) == hidden_, "x float32 [T, H]");
    const Places at(pages, owner, position, position);
    const std::vector<Pool> pools = pools_of(keys, values);
    const int64_t from = queries / kPanel * kPanel;  // panels that hold nothing but queries are left out
    std::vector<float> qkv(T * all);
    const float *xp = x.data_ptr<float>(), *c = cosine.data_ptr<float>(), *s = sine.data_ptr<float>();
    in_team([&](Team& team) {
      for (size_t l = 0; l < layers_.size(); ++l) {
        product(team, xp, T, layers_[l].qkv, all, qkv.data() + from, all, from);
        place_rows(team, layers_[l], T, qkv.data(), c, s, heads_, pools[l], at);
      }
    });
  }

 private:
  std::vector<Pool> pools_of(const std::vector<torch::Tensor>& keys, const std::vector<torch::Tensor>& values) const {
    TORCH_CHECK(keys.size() == layers_.size() && values.size() == layers_.size(), "a pool for every layer");
    std::vector<Pool> pools;
    for (size_t l = 0; l < keys.size(); ++l) pools.emplace_back(keys[l], values[l]);
    return pools;
  }

  void norm_rows(Team& team, const float* x, const torch::Tensor& weight, int64_t T, float* y) const {
    const float* w = weight.data_ptr<float>();
    team.stage(T, 1, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) rms_norm(x + t * hidden_, w, eps_, hidden_, y + t * hidden_);
    });
  }

  void add_rows(Team& team, float* x, const float* y, const torch::Tensor& bias, int64_t T) const {
    const float* b = bias.defined() ? bias.data_ptr<float>() : nullptr;
    team.stage(T, 1, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        float* to = x + t * hidden_;
        const float* from = y + t * hidden_;
        for (int64_t i = 0; i < hidden_; ++i) to[i] += from[i];
        if (b)
          for (int64_t i = 0; i < hidden_; ++i) to[i] += b[i];
      }
    });
  }

  // Bias, norm and rotation of query heads `first_query` .. and of all keys, in place; keys and values go to the pool.
  void place_rows(Team& team, const DecoderLayer& w, int64_t T, float* qkv, const float* cosine, const float* sine,
                  int64_t first_query, const Pool& pool, const Places& at) const {
    const int64_t all = (heads_ + 2 * key_heads_) * size_, half = size_ / 2;
    const float* bias = w.qkv_bias.defined() ? w.qkv_bias.data_ptr<float>() : nullptr;
    team.stage(T, 1, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        float* row = qkv + t * all;
        if (bias)
          for (int64_t i = first_query * size_; i < all; ++i) row[i] += bias[i];
        for (int64_t h = first_query; h < heads_ + key_heads_; ++h) {
          const torch::Tensor& norm = h < heads_ ? w.q_norm : w.k_norm;
          if (norm.defined()) rms_norm(row + h * size_, norm.data_ptr<float>(), eps_, size_, row + h * size_);
          rotate(row + h * size_, cosine + t * half, sine + t * half, size_);
        }
        const float* k = row + heads_ * size_;
        write_kv(k, k + key_heads_ * size_, t, pool, at);
      }
    });
  }

  int64_t hidden_, inner_, heads_, key_heads_, size_;
  float eps_, scale_;
  std::vector<DecoderLayer> layers_;
};

}  // namespace dspark
