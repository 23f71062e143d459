#pragma once

// Runs the ops of recurrent layers over steps of several sequences, and defines them in double
// precision (ops/recurrent_params.h).

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "ops/device_fixture.h"
#include "turbomind/ops/recurrent.h"

namespace turbomind::testing {

using Floats = std::vector<float>;

// Returns values that tests/reference/recurrent.py computes too, exactly.
inline Floats Pattern(int64_t size, int64_t seed) {
  Floats values;
  for (int64_t i = 0; i < size; ++i) {
    values.push_back(static_cast<float>((i * 37 + 11 * seed) % 101 - 50) / 32);
  }
  return values;
}

// A part of a sequence in a step.
struct Part {
  int seq = 0;
  int num_tokens = 1;
  std::vector<std::pair<int, int>> saves = {};  // num_tokens, checkpoint
};
using Parts = std::vector<Part>;

// The arrays of a step, as the engine builds them. Parts of one token come first.
struct RecurrentStep {
  // `lengths` are the tokens of each sequence before the step.
  RecurrentStep(const Parts& parts, const std::vector<int>& lengths, const std::vector<int>& of) {
    for (const Part& part : parts) {
      const int before = lengths[static_cast<size_t>(part.seq)];
      for (const auto& [num_tokens, checkpoint] : part.saves) {
        saves.push_back({static_cast<int32_t>(slots.size()), num_tokens, checkpoint});
      }
      slots.push_back(of[static_cast<size_t>(part.seq)]);
      num_decode += part.num_tokens == 1 && num_decode + 1 == std::ssize(slots) ? 1 : 0;
      cu_seqlens.push_back(cu_seqlens.back() + part.num_tokens);
      context_lens.push_back(before + part.num_tokens);
      for (int i = 0; i < part.num_tokens; ++i) {
        positions.push_back(before + i);
      }
    }
    tables.resize(slots.size());
  }

  BatchView batch() const {
    return {.num_seqs = static_cast<int>(slots.size()),
            .num_decode = num_decode,
            .num_tokens = cu_seqlens.back(),
            .cu_seqlens = cu_seqlens.data(),
            .context_lens = context_lens.data(),
            .positions = positions.data(),
            .block_tables = tables.data(),
            .block_table_stride = 1};
  }
  StateBatch states() const {
    return {slots.data(), saves.empty() ? nullptr : saves.data(), static_cast<int>(saves.size())};
  }

  // Runs the ops of the step.
  template <class F>
  void Run(Device& device, const F& ops) const {
    const std::vector<int32_t> tokens(positions.size());
    const StepGroup group = {.batch = batch(), .kv_heads = 1};
    const StateBatch of_step = states();
    device.RunStep({.tokens = tokens.data(),
                    .groups = &group,
                    .num_groups = 1,
                    .q_heads = 1,
                    .states = &of_step},
                   ops);
  }

  int num_decode = 0;
  std::vector<int32_t> tables;
  std::vector<int32_t> slots, cu_seqlens = {0}, context_lens, positions;
  std::vector<StateSave> saves;
};

// Slots of FP32 in a device's memory, with values around each state.
class StatePool {
 public:
  StatePool(Device& device, int num_slots, int64_t state_size, float fill)
      : size_(static_cast<size_t>(state_size)),
        slot_((size_ + kGuard + 15) / 16 * 16),
        values_(static_cast<size_t>(num_slots) * slot_, fill),
        memory_(device, values_) {}

  StateView view() const {
    // The state lies inside the slot, as one layer's does.
    auto* first = reinterpret_cast<std::byte*>(memory_.data() + kGuard / 2);
    return {first, static_cast<int64_t>(slot_ * sizeof(float))};
  }

  // Returns the states of the slots. Checks that nothing else was written.
  std::vector<Floats> Read(const std::vector<int>& written) const {
    Floats values = memory_.Read();
    std::vector<Floats> states;
    for (const int slot : written) {
      const auto first =
          values.begin() + static_cast<int64_t>(static_cast<size_t>(slot) * slot_ + kGuard / 2);
      states.emplace_back(first, first + static_cast<int64_t>(size_));
      std::copy_n(values_.begin(), size_, first);
    }
    CHECK(Same(values, values_));
    return states;
  }

 private:
  static constexpr size_t kGuard = 32;
  size_t size_, slot_;
  Floats values_;
  DeviceArray<float> memory_;
};

struct RecurrentResult {
  std::vector<Floats> out;          // of each sequence
  std::vector<Floats> states;       // of each sequence, after its last token
  std::vector<Floats> checkpoints;  // ascending

  bool operator==(const RecurrentResult&) const = default;
};

inline bool Same(const std::vector<Floats>& a, const std::vector<Floats>& b) {
  return std::ranges::equal(a, b, [](const Floats& x, const Floats& y) { return Same(x, y); });
}
inline bool Same(const RecurrentResult& a, const RecurrentResult& b) {
  return Same(a.out, b.out) && Same(a.states, b.states) && Same(a.checkpoints, b.checkpoints);
}

// The rows of values that an op reads for each token of each sequence. An op has row_size(),
// out_size() and state_size(), Arrays on a device, which Launch reads and writes, and InDouble.
template <class Op>
struct Sequences {
  Sequences(const Op& o, const std::vector<int>& lengths, uint32_t seed) : op(o) {
    for (const int length : lengths) {
      rows.push_back(op.RandomRows(length, seed++));
    }
  }

  // Runs the steps. All pools hold `stale` first.
  RecurrentResult Run(Device& device, const std::vector<Parts>& steps, float stale = 7.f) const {
    constexpr int kSpare = 2;
    const int num_seqs = static_cast<int>(rows.size());
    std::vector<int> slots;  // in reverse order, with a slot between two
    for (int i = 0; i < num_seqs; ++i) {
      slots.push_back(2 * (num_seqs - i));
    }
    std::vector<int> checkpoints;
    for (const Parts& parts : steps) {
      for (const Part& part : parts) {
        for (const auto& save : part.saves) {
          checkpoints.push_back(save.second);
        }
      }
    }
    std::ranges::sort(checkpoints);
    const int num_checkpoints = checkpoints.empty() ? 0 : checkpoints.back() + 1;
    const int first_save = 2 * num_seqs + kSpare;  // the slot of save 0
    const StatePool pool(device, first_save + num_checkpoints + kSpare, op.state_size(), stale);
    RecurrentResult result = {std::vector<Floats>(rows.size()), {}, {}};
    std::vector<int> lengths(rows.size());
    std::unique_ptr<Arrays> arrays;
    for (const Parts& parts : steps) {
      RecurrentStep step(parts, lengths, slots);
      for (StateSave& save : step.saves) {
        save.slot += first_save;
      }
      const Floats in = RowsOf(parts, lengths);
      // Steps of the same shape use the same memory, so that a device can replay them.
      if (arrays == nullptr || arrays->num_tokens != step.batch().num_tokens) {
        arrays = std::make_unique<Arrays>(op, device, step.batch().num_tokens);
      }
      arrays->Write(in);
      step.Run(device, [&] { op.Launch(device, *arrays, pool.view(), step); });
      Append(arrays->out.Read(), parts, lengths, result.out);
    }
    std::vector<int> written = slots;
    for (const int checkpoint : checkpoints) {
      written.push_back(first_save + checkpoint);
    }
    result.states = pool.Read(written);
    const auto saved = result.states.begin() + num_seqs;
    result.checkpoints.assign(saved, result.states.end());
    result.states.erase(saved, result.states.end());
    return result;
  }

  std::vector<std::vector<Exact>> InDouble() const {
    std::vector<std::vector<Exact>> out;
    for (const Floats& own : rows) {
      out.push_back(op.InDouble(own));
    }
    return out;
  }

  Op op;
  std::vector<Floats> rows;

 private:
  using Arrays = typename Op::Arrays;

  // Returns the next rows of each part.
  Floats RowsOf(const Parts& parts, const std::vector<int>& lengths) const {
    Floats in;
    for (const Part& part : parts) {
      const auto seq = static_cast<size_t>(part.seq);
      const auto first = rows[seq].begin() + lengths[seq] * op.row_size();
      in.insert(in.end(), first, first + part.num_tokens * op.row_size());
    }
    return in;
  }

  // Appends the outputs of a step to those of its sequences.
  void Append(const Floats& got, const Parts& parts, std::vector<int>& lengths,
              std::vector<Floats>& out) const {
    auto from = got.begin();
    for (const Part& part : parts) {
      const auto size = part.num_tokens * op.out_size();
      Floats& own = out[static_cast<size_t>(part.seq)];
      own.insert(own.end(), from, from + size);
      from += size;
      lengths[static_cast<size_t>(part.seq)] += part.num_tokens;
    }
  }
};

// Returns columns [begin, begin + size) of rows of `row_size` values, with `pad` values behind.
inline Floats Columns(const Floats& rows, int64_t row_size, int64_t begin, int64_t size,
                      int64_t pad) {
  Floats columns;
  for (auto row = rows.begin(); row != rows.end(); row += row_size) {
    columns.insert(columns.end(), row + begin, row + begin + size);
    columns.insert(columns.end(), static_cast<size_t>(pad), kNan);
  }
  return columns;
}

inline double Sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

struct ConvolutionOp {
  static constexpr int64_t kPad = 4;  // values behind each row, which are not read

  int channels = 16;
  int kernel = 4;
  bool has_bias = false;
  bool silu = true;
  double error = 0;  // of an output of 1
  bool gates_in = false;
  bool gates_out = false;

  int64_t row_size() const {  // x and the gates
    return int64_t{channels} * (1 + (gates_in ? 1 : 0) + (gates_out ? 1 : 0));
  }
  int64_t out_gate() const { return int64_t{channels} * (gates_in ? 2 : 1); }
  int64_t out_size() const { return channels; }
  int64_t state_size() const { return int64_t{kernel - 1} * channels; }
  Floats Weight() const { return Pattern(int64_t{kernel} * channels, 3); }
  Floats Bias() const { return has_bias ? Pattern(channels, 4) : Floats(); }
  Floats RandomRows(int num_tokens, uint32_t seed) const {
    return RandomVector(num_tokens * row_size(), seed);
  }

  struct Arrays {
    Arrays(const ConvolutionOp& o, Device& device, int tokens)
        : op(o),
          num_tokens(tokens),
          x(device, Floats(Size(o.row_size() + kPad))),
          weight(device, o.Weight()),
          bias(device, o.Bias()),
          out(device, Floats(Size(o.channels))) {}

    size_t Size(int64_t row) const { return static_cast<size_t>(num_tokens * row); }
    void Write(const Floats& rows) const {
      x.Write(Columns(rows, op.row_size(), 0, op.row_size(), kPad));
      out.Write(Floats(Size(op.channels), kNan));
    }

    const ConvolutionOp& op;
    int num_tokens;
    DeviceArray<float> x, weight, bias, out;
  };

  void Launch(Device& device, const Arrays& arrays, const StateView& pool,
              const RecurrentStep& step) const {
    const float* x = arrays.x.data();
    invokeShortConvolution(device, {.x = x,
                                    .in_gate = gates_in ? x + channels : nullptr,
                                    .out_gate = gates_out ? x + out_gate() : nullptr,
                                    .x_stride = row_size() + kPad,
                                    .weight = arrays.weight.data(),
                                    .bias = arrays.bias.data(),
                                    .out = arrays.out.data(),
                                    .channels = channels,
                                    .kernel = kernel,
                                    .silu = silu,
                                    .state = pool,
                                    .states = step.states(),
                                    .batch = step.batch()});
  }

  std::vector<Exact> InDouble(const Floats& rows) const {
    const Floats weight = Weight();
    const Floats bias = Bias();
    std::vector<Exact> out;
    for (int64_t token = 0; token < std::ssize(rows) / row_size(); ++token) {
      for (int64_t c = 0; c < channels; ++c) {
        double sum = has_bias ? bias[static_cast<size_t>(c)] : 0;
        for (int64_t j = std::max<int64_t>(0, kernel - 1 - token); j < kernel; ++j) {
          const float* x = rows.data() + (token + j - (kernel - 1)) * row_size() + c;
          sum += double{weight[static_cast<size_t>(j * channels + c)]} * x[0] *
                 (gates_in ? x[channels] : 1.);
        }
        const float* row = rows.data() + token * row_size() + c;
        const double want = (silu ? sum * Sigmoid(sum) : sum) * (gates_out ? row[out_gate()] : 1.);
        out.push_back({want, error * (1 + std::abs(want))});
      }
    }
    return out;
  }
};

}  // namespace turbomind::testing
