#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace turbomind {

// Statistics of K and V for calibration, taken as the codec receives them: K after RoPE, and after
// mean removal and rotation if these are on. They are sums over all tokens, per model layer and KV
// head. Only the engine thread may use it.
class KvStatistics {
 public:
  // Returns the histogram bin of |x|, from the float's bits. There are 16 bins per octave from
  // 2^-20 on, so every limit of a format (448, 2688, 3072, ...) is a bin edge. Bin i begins at 2^(i
  // / 16 - 20) · (1 + i % 16 / 16). The first bin also counts smaller values; the last also counts
  // larger values and NaN.
  static constexpr int kBins = 640;
  static int Bin(float x);

  struct Side {
    std::vector<float> amax;         // [layers, kv_heads], of finite values
    std::vector<int64_t> histogram;  // [layers, kv_heads, kBins]
  };

  KvStatistics(int num_layers, int kv_heads, int head_dim);

  // Rows k and v of [kv_heads, head_dim]; tokens are `stride` floats apart.
  struct Rows {
    const float* k = nullptr;
    const float* v = nullptr;
    int64_t stride = 0;
    int num_tokens = 0;
  };
  void Add(int layer, const Rows& rows);

  int num_layers() const { return num_layers_; }
  int kv_heads() const { return kv_heads_; }
  int head_dim() const { return head_dim_; }
  int64_t num_tokens() const { return num_tokens_; }           // of the first layer
  const std::vector<double>& k_sum() const { return k_sum_; }  // [layers, kv_heads, head_dim]
  const std::vector<double>& k_square_sum() const { return k_square_sum_; }  // same shape
  const Side& k() const { return sides_[0]; }
  const Side& v() const { return sides_[1]; }

 private:
  int num_layers_;
  int kv_heads_;
  int head_dim_;
  int64_t num_tokens_ = 0;
  std::vector<double> k_sum_;
  std::vector<double> k_square_sum_;
  std::array<Side, 2> sides_;
};

}  // namespace turbomind
