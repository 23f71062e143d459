#pragma once

// A random layer of experts on a device, with a reference in double precision.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "engine/null_device.h"
#include "turbomind/ops/moe.h"

namespace turbomind::moe {

inline constexpr int kHidden = 64;
inline constexpr int kInner = 48;
inline constexpr int kShared = 80;
inline constexpr int kExperts = 8;
inline constexpr int kLatent = 32;

inline std::vector<float> Random(uint32_t seed, size_t size, float range) {
  std::mt19937 generator(seed);
  std::uniform_real_distribution<float> uniform(-range, range);
  std::vector<float> values(size);
  std::ranges::generate(values, [&] { return uniform(generator); });
  return values;
}

// A matrix as values for the reference and in packed form.
struct Matrix {
  int rows = 0;
  int cols = 0;
  std::vector<float> values;  // [rows, cols]
  std::vector<float> bias;    // [rows] or empty
  std::unique_ptr<PackedMatrix> packed;

  MatrixView view() const { return {packed.get(), bias.empty() ? nullptr : bias.data()}; }

  std::vector<double> Times(const double* x) const {
    std::vector<double> y(static_cast<size_t>(rows));
    for (size_t r = 0; r < y.size(); ++r) {
      y[r] = bias.empty() ? 0. : double{bias[r]};
      for (size_t c = 0; c < static_cast<size_t>(cols); ++c) {
        y[r] += values[r * static_cast<size_t>(cols) + c] * x[c];
      }
    }
    return y;
  }
};

struct Shape {
  int top_k = 3;
  bool normalize = true;
  bool interleaved = false;
  bool has_bias = true;
  bool has_shared = false;
  Activation activation = Activation::kSilu;
  bool weigh_inputs = false;  // REQUIRES: no biases
  bool gated = true;
  bool is_latent = false;
};

// One random layer with its matrices and scratch for `max_tokens`.
class TestLayer {
 public:
  TestLayer(const Shape& shape, Device& device, int max_tokens, bool quantized = false)
      : shape_(shape), device_(device), quantized_(quantized) {
    router_ = Make(kExperts, kHidden, 1.f, true);
    const int outer = shape.is_latent ? kLatent : kHidden;
    for (int e = 0; e < kExperts; ++e) {
      gate_.push_back(Make(kInner, outer));
      up_.push_back(Make(kInner, outer));
      down_.push_back(Make(outer, kInner));
    }
    layer_ = {.hidden_size = kHidden,
              .num_experts = kExperts,
              .top_k = shape.top_k,
              .intermediate_size = kInner,
              .normalize = shape.normalize,
              .weigh_inputs = shape.weigh_inputs,
              .activation = shape.activation,
              .swiglu_limit = 0.9f,
              .router = router_.view()};
    for (size_t e = 0; e < kExperts; ++e) {
      layer_.down.push_back(down_[e].view());
      if (shape.interleaved) {
        both_.push_back(Interleave(gate_[e], up_[e]));
        layer_.gate_up.push_back(both_.back().view());
      } else {
        if (shape.gated) {
          layer_.gate.push_back(gate_[e].view());
        }
        layer_.up.push_back(up_[e].view());
      }
    }
    if (shape.is_latent) {
      latent_down_ = Make(kLatent, kHidden);
      latent_up_ = Make(kHidden, kLatent);
      layer_.latent_size = kLatent;
      layer_.latent_down = latent_down_.view();
      layer_.latent_up = latent_up_.view();
    }
    if (shape.has_shared) {
      AddShared();
    }
    PlaceScratch(max_tokens);
  }

  const MoeLayer& layer() const { return layer_; }
  MoeLayer& layer() { return layer_; }
  const MoeScratch& scratch() const { return scratch_; }
  Matrix& router() { return router_; }

  // Runs the layer: x → out, both [tokens, hidden].
  void Run(const std::vector<float>& x, std::vector<float>& out) {
    const int tokens = static_cast<int>(x.size()) / kHidden;
    invokeMoe(device_, {.layer = &layer_,
                        .x = x.data(),
                        .out = out.data(),
                        .num_tokens = tokens,
                        .scratch = scratch_});
  }

  // Computes one token in double precision from the definition.
  std::vector<double> Reference(const float* token) const {
    const std::vector<double> x(token, token + kHidden);
    const std::vector<double> logits = router_.Times(x.data());
    std::vector<size_t> order(kExperts);
    std::iota(order.begin(), order.end(), size_t{0});
    std::ranges::stable_sort(order, [&](size_t a, size_t b) { return logits[a] > logits[b]; });
    order.resize(static_cast<size_t>(shape_.top_k));
    double all = 0;
    double chosen = 0;
    for (size_t e = 0; e < kExperts; ++e) {
      all += std::exp(logits[e]);
      chosen += std::ranges::count(order, e) > 0 ? std::exp(logits[e]) : 0.;
    }
    const std::vector<double> inputs = shape_.is_latent ? latent_down_.Times(x.data()) : x;
    std::vector<double> out(inputs.size());
    for (size_t e : order) {
      const double weight = std::exp(logits[e]) / (shape_.normalize ? chosen : all);
      std::vector<double> in = inputs;
      for (double& value : in) {
        value *= shape_.weigh_inputs ? weight : 1;
      }
      Add(down_[e], Activate(gate_[e].Times(in.data()), up_[e].Times(in.data())),
          shape_.weigh_inputs ? 1 : weight, out);
    }
    if (shape_.is_latent) {
      out = latent_up_.Times(out.data());
    }
    if (shape_.has_shared) {
      const double logit = shared_router_.Times(x.data())[0];
      Add(shared_down_, Activate(shared_gate_.Times(x.data()), shared_up_.Times(x.data())),
          1 / (1 + std::exp(-logit)), out);
    }
    return out;
  }

 private:
  Matrix Make(int rows, int cols, float range = 0.3f, bool exact = false) {
    Matrix matrix{rows, cols, Random(seed_++, static_cast<size_t>(rows * cols), range), {}, {}};
    if (shape_.has_bias) {
      matrix.bias = Random(seed_++, static_cast<size_t>(rows), 0.2f);
    }
    Pack(matrix, exact);
    return matrix;
  }

  void Pack(Matrix& matrix, bool exact) {
    if (!quantized_ || exact) {
      matrix.packed = device_.PackMatrix(
          {MatrixFormat::kF32, matrix.values.data(), matrix.rows, matrix.cols}, true);
      return;
    }
    std::vector<uint16_t> bf16(matrix.values.size());
    for (size_t i = 0; i < bf16.size(); ++i) {
      uint32_t bits;
      std::memcpy(&bits, &matrix.values[i], sizeof(bits));
      bf16[i] = static_cast<uint16_t>(bits >> 16);
    }
    matrix.packed =
        device_.PackMatrix({MatrixFormat::kBF16, bf16.data(), matrix.rows, matrix.cols}, false);
  }

  Matrix Interleave(const Matrix& gate, const Matrix& up) {
    Matrix both{2 * gate.rows, gate.cols, {}, {}, {}};
    for (int r = 0; r < gate.rows; ++r) {
      for (const Matrix* from : {&gate, &up}) {
        const auto row = from->values.begin() + r * from->cols;
        both.values.insert(both.values.end(), row, row + from->cols);
        if (!from->bias.empty()) {
          both.bias.push_back(from->bias[static_cast<size_t>(r)]);
        }
      }
    }
    Pack(both, false);
    return both;
  }

  void AddShared() {
    shared_gate_ = Make(kShared, kHidden);
    shared_up_ = Make(kShared, kHidden);
    shared_down_ = Make(kHidden, kShared);
    shared_router_ = Make(1, kHidden, 1.f, true);
    layer_.shared_intermediate_size = kShared;
    layer_.shared_gate = shape_.gated ? shared_gate_.view() : MatrixView();
    layer_.shared_up = shared_up_.view();
    layer_.shared_down = shared_down_.view();
    layer_.shared_router = shared_router_.view();
  }

  // Fills the scratch with NaN and with ids out of range, so that reads before the first write fail
  // the test.
  void PlaceScratch(int max_tokens) {
    const auto tokens = static_cast<size_t>(max_tokens);
    const size_t width = std::max(shape_.top_k * kInner, kShared);
    const auto floats = [this](size_t count) {
      buffers_.emplace_back(count, std::numeric_limits<float>::quiet_NaN());
      return buffers_.back().data();
    };
    const auto ints = [this](size_t count) {
      ids_.emplace_back(count, -7);
      return ids_.back().data();
    };
    const size_t slots = tokens * static_cast<size_t>(shape_.top_k);
    scratch_.max_tokens = max_tokens;
    scratch_.logits = floats(tokens * kExperts);
    scratch_.weights = floats(slots);
    scratch_.ids = ints(slots);
    scratch_.slots = ints(slots);
    scratch_.x_rows = ints(slots);
    scratch_.slot_weights = floats(slots);
    scratch_.offsets = ints(kExperts + 1);
    scratch_.gate_up = floats(tokens * 2 * width);
    scratch_.activated = floats(tokens * width);
    scratch_.output = floats(slots * kHidden);
    scratch_.latent = floats(tokens * kLatent);
  }

  std::vector<double> Activate(const std::vector<double>& gate,
                               const std::vector<double>& up) const {
    std::vector<double> out(gate.size());
    for (size_t i = 0; i < out.size(); ++i) {
      if (shape_.activation == Activation::kRelu2) {  // has no gate
        out[i] = std::max(up[i], 0.) * std::max(up[i], 0.);
      } else if (shape_.activation == Activation::kClampedSwiglu) {
        const double limit = layer_.swiglu_limit;
        const double g = std::min(gate[i], limit);
        out[i] = g / (1 + std::exp(-1.702 * g)) * (std::clamp(up[i], -limit, limit) + 1);
      } else {
        out[i] = gate[i] / (1 + std::exp(-gate[i])) * up[i];
      }
    }
    return out;
  }

  static void Add(const Matrix& down, const std::vector<double>& inner, double weight,
                  std::vector<double>& out) {
    const std::vector<double> y = down.Times(inner.data());
    for (size_t i = 0; i < out.size(); ++i) {
      out[i] += weight * y[i];
    }
  }

  Shape shape_;
  Device& device_;
  bool quantized_;
  uint32_t seed_ = 1;
  Matrix router_;
  std::vector<Matrix> gate_, up_, both_, down_;
  Matrix latent_down_, latent_up_;
  Matrix shared_gate_, shared_up_, shared_down_, shared_router_;
  MoeLayer layer_;
  MoeScratch scratch_;
  std::vector<std::vector<float>> buffers_;
  std::vector<std::vector<int32_t>> ids_;
};

inline std::vector<Shape> AllShapes() {
  std::vector<Shape> shapes;
  for (int top_k : {1, 3, kExperts}) {
    for (bool normalize : {false, true}) {
      for (bool interleaved : {false, true}) {
        for (bool has_shared : {false, true}) {
          const Activation activation =
              interleaved ? Activation::kClampedSwiglu : Activation::kSilu;
          shapes.push_back({top_k, normalize, interleaved, top_k != 1, has_shared, activation});
        }
      }
    }
  }
  shapes.push_back({.interleaved = false, .activation = Activation::kClampedSwiglu});
  for (const bool interleaved : {false, true}) {
    for (const int top_k : {1, 3}) {
      shapes.push_back({.top_k = top_k,
                        .normalize = false,
                        .interleaved = interleaved,
                        .has_bias = false,
                        .has_shared = true,
                        .weigh_inputs = true});
    }
  }
  for (const bool weigh_inputs : {false, true}) {
    shapes.push_back({.has_bias = !weigh_inputs,
                      .has_shared = true,
                      .activation = Activation::kRelu2,
                      .weigh_inputs = weigh_inputs,
                      .gated = false});
  }
  for (const bool gated : {false, true}) {
    shapes.push_back({.has_shared = true,
                      .activation = gated ? Activation::kSilu : Activation::kRelu2,
                      .gated = gated,
                      .is_latent = true});
  }
  return shapes;
}

// Makes `router` return these logits for every token.
inline void SetLogits(Matrix& router, Device& device, const std::vector<float>& logits) {
  std::ranges::fill(router.values, 0.f);
  router.bias = logits;
  router.packed =
      device.PackMatrix({MatrixFormat::kF32, router.values.data(), router.rows, router.cols}, true);
}

// Records which matrices are read, and counts the rows.
class CountingDevice : public testing::ForwardingDevice {
 public:
  using ForwardingDevice::ForwardingDevice;
  void GroupedLinear(const GroupedLinearParams& params) override {
    for (int i = 0; i < params.num_experts; ++i) {
      if (params.offsets[i] < params.offsets[i + 1]) {
        reads.push_back(params.experts[i].weight);
      }
    }
    num_rows += params.num_rows;
    ForwardingDevice::GroupedLinear(params);
  }

  std::vector<const PackedMatrix*> reads;
  int num_rows = 0;
};

inline bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

}  // namespace turbomind::moe
