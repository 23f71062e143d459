#pragma once

// The rules of heads with a matrix state: runs them on a device, and defines them in double
// precision (ops/recurrent_params.h).

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "ops/recurrent_fixture.h"

namespace turbomind::testing {

// What a rule reads for a token of a value head.
struct HeadToken {
  std::vector<double> q, k, v;
  double b, dt, decay, skip;
};

// A matrix state of [key_dim, value_dim].
struct StateMatrix {
  int key_dim, value_dim;
  std::vector<double> values = std::vector<double>(static_cast<size_t>(key_dim * value_dim));

  void Scale(double factor) {
    for (double& value : values) {
      value *= factor;
    }
  }
  // Adds k ⊗ v.
  void Add(const std::vector<double>& k, const std::vector<double>& v) {
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] += k[i / v.size()] * v[i % v.size()];
    }
  }
  // Returns Sᵀ x.
  std::vector<double> Times(const std::vector<double>& x) const {
    std::vector<double> sums(static_cast<size_t>(value_dim));
    for (size_t i = 0; i < values.size(); ++i) {
      sums[i % sums.size()] += values[i] * x[i / sums.size()];
    }
    return sums;
  }
};

struct DeltaRule {
  static constexpr int kGates = 2;  // b and a
  static float QueryScale(int) { return 1; }

  template <class Arrays>
  static void Launch(Device& device, const StateHeads& heads, const Arrays& arrays) {
    invokeGatedDelta(device, {.heads = heads, .b = arrays.gates.data()});
  }

  static std::vector<double> AddToken(const HeadToken& token, StateMatrix& state) {
    const std::vector<double> k = Normalized(token.k, 1);
    state.Scale(token.decay);
    std::vector<double> delta = state.Times(k);
    for (size_t c = 0; c < delta.size(); ++c) {
      delta[c] = Sigmoid(token.b) * (token.v[c] - delta[c]);
    }
    state.Add(k, delta);
    return state.Times(Normalized(token.q, std::sqrt(state.key_dim)));
  }

 private:
  static std::vector<double> Normalized(std::vector<double> x, double divisor) {
    double squares = 0;
    for (const double value : x) {
      squares += value * value;
    }
    for (double& value : x) {
      value /= std::sqrt(squares + 1e-6) * divisor;
    }
    return x;
  }
};

struct ScanRule {
  static constexpr int kGates = 1;  // a
  // Returns the length of queries for which outputs of every key_dim have one size.
  static float QueryScale(int key_dim) { return 1 / std::sqrt(static_cast<float>(key_dim)); }

  template <class Arrays>
  static void Launch(Device& device, const StateHeads& heads, const Arrays& arrays) {
    invokeSelectiveScan(device, {.heads = heads, .skip = arrays.skip.data()});
  }

  static std::vector<double> AddToken(const HeadToken& token, StateMatrix& state) {
    std::vector<double> added = token.v;
    for (double& value : added) {
      value *= token.dt;
    }
    state.Scale(token.decay);
    state.Add(token.k, added);
    std::vector<double> out = state.Times(token.q);
    for (size_t c = 0; c < out.size(); ++c) {
      out[c] += token.skip * token.v[c];
    }
    return out;
  }
};

template <class Rule>
struct HeadsOp {
  static constexpr int64_t kPad = 4;  // values behind each row, which are not read

  int key_heads = 1;
  int value_heads = 1;
  int key_dim = 16;
  int value_dim = 16;
  double error = 0;    // of an output of 1
  bool tiled = false;  // value head h reads key head h % key_heads

  int64_t keys() const { return int64_t{key_heads} * key_dim; }
  int64_t values() const { return int64_t{value_heads} * value_dim; }
  int64_t qkv_size() const { return 2 * keys() + values(); }
  int64_t gates_size() const { return int64_t{Rule::kGates} * value_heads; }
  int64_t row_size() const { return qkv_size() + gates_size(); }  // q, k, v, gates
  int64_t out_size() const { return values(); }
  int64_t state_size() const { return value_heads * int64_t{key_dim} * value_dim; }

  Floats Decay() const {
    Floats decay = Pattern(value_heads, 1);
    std::ranges::transform(decay, decay.begin(), [](float x) { return x * x + 0.015625f; });
    return decay;
  }
  Floats DtBias() const { return Pattern(value_heads, 2); }
  Floats Skip() const { return Pattern(value_heads, 6); }

  // Every fifth token has keys and queries so short that the eps of a norm matters.
  Floats RandomRows(int num_tokens, uint32_t seed) const {
    Floats rows = RandomVector(num_tokens * row_size(), seed);
    for (int64_t i = 0; i < std::ssize(rows); ++i) {
      const int64_t in_row = i % row_size();
      const bool is_short = in_row < 2 * keys() && i / row_size() % 5 == 4;
      rows[static_cast<size_t>(i)] *= is_short ? 0x1p-10f : in_row < qkv_size() ? 1.f : 4.f;
      rows[static_cast<size_t>(i)] *= in_row < keys() ? Rule::QueryScale(key_dim) : 1.f;
    }
    return rows;
  }

  struct Arrays {
    Arrays(const HeadsOp& o, Device& device, int tokens)
        : op(o),
          num_tokens(tokens),
          qkv(device, Floats(Size(o.qkv_size() + kPad))),
          gates(device, Floats(Size(o.gates_size() + kPad))),
          decay(device, o.Decay()),
          dt_bias(device, o.DtBias()),
          skip(device, o.Skip()),
          out(device, Floats(Size(o.out_size()))) {}

    size_t Size(int64_t row) const { return static_cast<size_t>(num_tokens * row); }
    void Write(const Floats& rows) const {
      qkv.Write(Columns(rows, op.row_size(), 0, op.qkv_size(), kPad));
      gates.Write(Columns(rows, op.row_size(), op.qkv_size(), op.gates_size(), kPad));
      out.Write(Floats(Size(op.out_size()), kNan));
    }

    const HeadsOp& op;
    int num_tokens;
    DeviceArray<float> qkv, gates, decay, dt_bias, skip, out;
  };

  void Launch(Device& device, const Arrays& arrays, const StateView& pool,
              const RecurrentStep& step) const {
    Rule::Launch(device,
                 {.q = arrays.qkv.data(),
                  .k = arrays.qkv.data() + keys(),
                  .v = arrays.qkv.data() + 2 * keys(),
                  .qkv_stride = qkv_size() + kPad,
                  .a = arrays.gates.data() + gates_size() - value_heads,
                  .gate_stride = gates_size() + kPad,
                  .decay = arrays.decay.data(),
                  .dt_bias = arrays.dt_bias.data(),
                  .out = arrays.out.data(),
                  .key_heads = key_heads,
                  .value_heads = value_heads,
                  .key_dim = key_dim,
                  .value_dim = value_dim,
                  .tiled = tiled,
                  .state = pool,
                  .states = step.states(),
                  .batch = step.batch()},
                 arrays);
  }

  std::vector<Exact> InDouble(const Floats& rows) const {
    const Floats decay = Decay();
    const Floats bias = DtBias();
    const Floats skip = Skip();
    std::vector<StateMatrix> states(static_cast<size_t>(value_heads), {key_dim, value_dim});
    std::vector<Exact> out;
    for (auto row = rows.begin(); row != rows.end(); row += row_size()) {
      for (int head = 0; head < value_heads; ++head) {
        const int key_head = tiled ? head % key_heads : head / (value_heads / key_heads);
        const auto q = row + key_head * key_dim;
        const auto v = row + 2 * keys() + int64_t{head} * value_dim;
        const auto gates = row + qkv_size() + head;
        const auto at = static_cast<size_t>(head);
        const double a = gates[gates_size() - value_heads];
        const double dt = std::log1p(std::exp(a + bias[at]));
        const HeadToken token = {.q = {q, q + key_dim},
                                 .k = {q + keys(), q + keys() + key_dim},
                                 .v = {v, v + value_dim},
                                 .b = gates[0],
                                 .dt = dt,
                                 .decay = std::exp(-decay[at] * dt),
                                 .skip = skip[at]};
        for (const double value : Rule::AddToken(token, states[at])) {
          out.push_back({value, error * (1 + std::abs(value))});
        }
      }
    }
    return out;
  }
};

using DeltaOp = HeadsOp<DeltaRule>;
using ScanOp = HeadsOp<ScanRule>;

}  // namespace turbomind::testing
