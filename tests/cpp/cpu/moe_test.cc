#include "turbomind/ops/moe.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "engine/null_device.h"
#include "turbomind/backend/cpu/cpu_device.h"
#include "turbomind/core/check.h"

using namespace turbomind;

namespace {

// FP32 sums of at most 96 products each, three in a row, of values around 1. Measured: 1.7e-6.
constexpr double kAbsolute = 5e-6;
constexpr int kHidden = 64;
constexpr int kInner = 48;
constexpr int kShared = 80;
constexpr int kExperts = 8;

std::vector<float> Random(uint32_t seed, size_t size, float range) {
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
};

// One random layer with its matrices and scratch for `max_tokens`.
class TestLayer {
 public:
  TestLayer(const Shape& shape, Device& device, int max_tokens, bool quantized = false)
      : shape_(shape), device_(device), quantized_(quantized) {
    router_ = Make(kExperts, kHidden, 1.f, true);
    for (int e = 0; e < kExperts; ++e) {
      gate_.push_back(Make(kInner, kHidden));
      up_.push_back(Make(kInner, kHidden));
      down_.push_back(Make(kHidden, kInner));
    }
    layer_ = {.hidden_size = kHidden,
              .num_experts = kExperts,
              .top_k = shape.top_k,
              .intermediate_size = kInner,
              .normalize = shape.normalize,
              .activation = shape.activation,
              .swiglu_limit = 0.9f,
              .router = router_.view()};
    for (size_t e = 0; e < kExperts; ++e) {
      layer_.down.push_back(down_[e].view());
      if (shape.interleaved) {
        both_.push_back(Interleave(gate_[e], up_[e]));
        layer_.gate_up.push_back(both_.back().view());
      } else {
        layer_.gate.push_back(gate_[e].view());
        layer_.up.push_back(up_[e].view());
      }
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
    std::vector<double> out(kHidden);
    for (size_t e : order) {
      const double weight = std::exp(logits[e]) / (shape_.normalize ? chosen : all);
      Add(down_[e], Activate(gate_[e].Times(x.data()), up_[e].Times(x.data())), weight, out);
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
    layer_.shared_gate = shared_gate_.view();
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
    scratch_.offsets = ints(kExperts + 1);
    scratch_.gate_up = floats(tokens * 2 * width);
    scratch_.activated = floats(tokens * width);
    scratch_.output = floats(slots * kHidden);
  }

  std::vector<double> Activate(const std::vector<double>& gate,
                               const std::vector<double>& up) const {
    std::vector<double> out(gate.size());
    for (size_t i = 0; i < out.size(); ++i) {
      if (shape_.activation == Activation::kClampedSwiglu) {
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
  Matrix shared_gate_, shared_up_, shared_down_, shared_router_;
  MoeLayer layer_;
  MoeScratch scratch_;
  std::vector<std::vector<float>> buffers_;
  std::vector<std::vector<int32_t>> ids_;
};

std::vector<Shape> AllShapes() {
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
  return shapes;
}

// Makes `router` return these logits for every token.
void SetLogits(Matrix& router, Device& device, const std::vector<float>& logits) {
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

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

}  // namespace

TEST_CASE("experts agree with double precision") {
  const auto device = MakeCpuDevice(2);
  constexpr int kTokens = 29;
  const std::vector<float> x = Random(91, kTokens * kHidden, 1.5f);
  const std::vector<float> residual = Random(92, x.size(), 1.f);
  for (const Shape& shape : AllShapes()) {
    CAPTURE(shape.top_k);
    CAPTURE(shape.normalize);
    CAPTURE(shape.interleaved);
    CAPTURE(shape.has_shared);
    TestLayer layer(shape, *device, kTokens);
    std::vector<float> out = residual;
    layer.Run(x, out);
    double max_value = 0;
    for (size_t t = 0; t < kTokens; ++t) {
      const std::vector<double> want = layer.Reference(x.data() + t * kHidden);
      for (size_t i = 0; i < kHidden; ++i) {
        const size_t at = t * kHidden + i;
        max_value = std::max(max_value, std::abs(out[at] - residual[at] - want[i]));
      }
    }
    CHECK(max_value < kAbsolute);
  }
}

TEST_CASE("a NaN or infinite token affects only its own row") {
  const auto device = MakeCpuDevice(2);
  TestLayer layer({.has_shared = true}, *device, 5);
  std::vector<float> x = Random(3, 5 * kHidden, 1.f);
  std::vector<float> clean(x.size());
  layer.Run(x, clean);
  for (const float bad : {NAN, std::numeric_limits<float>::infinity()}) {
    x[2 * kHidden + 7] = bad;
    std::vector<float> out(x.size());
    layer.Run(x, out);
    for (size_t i = 0; i < out.size(); ++i) {
      if (i / kHidden == 2) {
        CHECK(!std::isfinite(out[i]));
      } else {
        CHECK(out[i] == clean[i]);
      }
    }
  }
}

TEST_CASE("a token has the same bits in every batch, chunk, thread count and instruction set") {
  constexpr size_t kTokens = 64;
  const std::vector<float> x = Random(17, kTokens * kHidden, 1.5f);
  for (const bool quantized : {false, true}) {
    std::vector<float> want;
    for (const std::string& isa : AvailableCpuIsas()) {
      for (const int threads : {1, 2}) {
        const auto device = MakeCpuDevice(threads, isa);
        TestLayer layer({.has_shared = true}, *device, kTokens, quantized);
        for (const size_t chunk : {kTokens, size_t{1}, size_t{13}}) {
          std::vector<float> out(x.size());
          for (size_t first = 0; first < kTokens; first += chunk) {
            const size_t tokens = std::min(chunk, kTokens - first);
            const auto begin = static_cast<std::ptrdiff_t>(first * kHidden);
            const auto end = static_cast<std::ptrdiff_t>((first + tokens) * kHidden);
            std::vector<float> piece(tokens * kHidden);
            layer.Run({x.begin() + begin, x.begin() + end}, piece);
            std::ranges::copy(piece, out.begin() + begin);
          }
          if (want.empty()) {
            want = out;
          }
          REQUIRE(SameBits(want, out));
        }
      }
    }
  }
}

TEST_CASE("the layer is correct if all tokens select the same experts and other experts get none") {
  const auto device = MakeCpuDevice(2);
  constexpr int kTokens = 40;
  TestLayer layer({.top_k = 2}, *device, kTokens);
  std::vector<float> logits(kExperts, -4.f);
  logits[6] = 2.f;
  logits[1] = 1.f;
  SetLogits(layer.router(), *device, logits);
  layer.layer().router = layer.router().view();
  const std::vector<float> x = Random(5, kTokens * kHidden, 1.f);
  std::vector<float> out(x.size());
  layer.Run(x, out);
  for (size_t t = 0; t < kTokens; ++t) {
    CHECK(layer.scratch().ids[2 * t] == 1);
    CHECK(layer.scratch().ids[2 * t + 1] == 6);
    const std::vector<double> want = layer.Reference(x.data() + t * kHidden);
    for (size_t i = 0; i < kHidden; ++i) {
      CHECK(std::abs(out[t * kHidden + i] - want[i]) < kAbsolute);
    }
  }
}

TEST_CASE("one token reads only its own experts, and many tokens read each expert once") {
  constexpr int kTokens = 64;
  CountingDevice device(MakeCpuDevice(1));
  TestLayer layer({.top_k = 3}, device, kTokens);
  const std::vector<float> x = Random(6, kTokens * kHidden, 1.5f);
  for (const int tokens : {1, kTokens}) {
    device.reads.clear();
    device.num_rows = 0;
    const std::vector<float> some(x.begin(), x.begin() + tokens * kHidden);
    std::vector<float> out(some.size());
    layer.Run(some, out);
    std::vector<int32_t> experts(layer.scratch().ids, layer.scratch().ids + 3 * tokens);
    std::ranges::sort(experts);
    const auto repeated = std::ranges::unique(experts);
    experts.erase(repeated.begin(), repeated.end());
    CHECK(experts.size() == (tokens == 1 ? 3 : kExperts));
    CHECK(device.num_rows == 3 * 3 * tokens);  // gate, up and down; three experts per token
    REQUIRE(device.reads.size() == 3 * experts.size());
    for (size_t i = 0; i < experts.size(); ++i) {
      const auto expert = static_cast<size_t>(experts[i]);
      CHECK(device.reads[i] == layer.layer().gate[expert].weight);
      CHECK(device.reads[experts.size() + i] == layer.layer().up[expert].weight);
      CHECK(device.reads[2 * experts.size() + i] == layer.layer().down[expert].weight);
    }
  }
}

TEST_CASE("a grouped layer returns the same bits as its groups one by one") {
  constexpr size_t kRows = 23;
  constexpr int64_t kStride = 2 * kInner + 5;
  const std::vector<float> x = Random(8, 9 * kHidden, 1.f);
  const auto device = MakeCpuDevice(2);
  std::vector<Matrix> weights;
  for (uint32_t i = 0; i < 3; ++i) {
    Matrix matrix{kInner, kHidden, Random(20 + i, kInner * kHidden, 0.3f), {}, {}};
    matrix.packed = device->PackMatrix(
        {MatrixFormat::kF32, matrix.values.data(), matrix.rows, matrix.cols}, false);
    if (i != 1) {
      matrix.bias = Random(40 + i, kInner, 1.f);
    }
    weights.push_back(std::move(matrix));
  }
  std::vector<int32_t> x_rows(kRows);
  for (size_t i = 0; i < kRows; ++i) {
    x_rows[i] = static_cast<int32_t>((i * 5) % 9);
  }
  const LinearPart experts[] = {{weights[0].packed.get(), weights[0].view().bias},
                                {weights[1].packed.get(), weights[1].view().bias},
                                {weights[2].packed.get(), weights[2].view().bias}};
  const int32_t offsets[] = {0, 16, 17, kRows};
  std::vector<float> got(kRows * kStride, -1.f);
  std::vector<float> want = got;
  device->GroupedLinear({.x = x.data(),
                         .x_stride = kHidden,
                         .x_rows = x_rows.data(),
                         .y = got.data(),
                         .y_stride = kStride,
                         .experts = experts,
                         .num_experts = 3,
                         .offsets = offsets,
                         .num_rows = kRows});
  for (int expert = 0; expert < 3; ++expert) {
    for (int row = offsets[expert]; row < offsets[expert + 1]; ++row) {
      device->Linear({.x = x.data() + x_rows[static_cast<size_t>(row)] * kHidden,
                      .x_stride = kHidden,
                      .parts = &experts[expert],
                      .num_parts = 1,
                      .y = want.data() + row * kStride,
                      .y_stride = kStride,
                      .num_rows = 1});
    }
  }
  CHECK(SameBits(got, want));
}

TEST_CASE("inconsistent arguments raise InternalError") {
  const auto device = MakeCpuDevice(1);
  const std::vector<float> x(4 * kHidden, 0.5f);
  std::vector<float> out(x.size());
  const auto broken = [&](auto change) {
    TestLayer layer({.has_shared = true}, *device, 4);
    change(layer.layer());
    CHECK_THROWS_AS(layer.Run(x, out), InternalError);
  };
  broken([](MoeLayer& layer) { layer.top_k = kExperts + 1; });
  broken([](MoeLayer& layer) { layer.top_k = 0; });
  broken([](MoeLayer& layer) { layer.num_experts = kExperts + 1; });
  broken([](MoeLayer& layer) { layer.intermediate_size = kInner + 1; });
  broken([](MoeLayer& layer) { layer.down.pop_back(); });
  broken([](MoeLayer& layer) { layer.up[3].weight = nullptr; });
  broken([](MoeLayer& layer) { layer.gate[3] = layer.down[3]; });
  broken([](MoeLayer& layer) { layer.shared_down = {}; });
  broken([](MoeLayer& layer) { layer.shared_router = layer.router; });
  TestLayer narrow({}, *device, 3);
  CHECK_THROWS_AS(narrow.Run(x, out), InternalError);
}
