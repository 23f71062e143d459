#pragma once

// The properties of linear layers, checked for every format with every arithmetic. A test lists the
// arithmetics of its device (cpu/linear_test.cc, cuda/linear_ops_test.cc). A format or a device in
// such a list gets all tests.

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "cpu/linear_fixture.h"
#include "turbomind/core/check.h"

namespace turbomind::testing {

// The exact value of an output, and what bounds the error of the kernels.
struct ExactOutput {
  double want = 0;       // with the bias and the former output
  double product = 0;    // Σ w x
  double magnitude = 0;  // Σ |w x|
  double sum_of_x = 0;   // Σ |x|
  double largest = 0;    // Σ |w| · the largest |x| of the 32 columns
  int64_t cols = 0;
  MatrixFormat format = MatrixFormat::kF32;  // of the packed matrix
  bool bias = false;
};

struct TestDevice {
  std::string name;
  std::function<std::unique_ptr<Device>(int threads)> make;
  bool is_slow = false;
};

// How kernels compute, and the sizes at which they differ.
struct Arithmetic {
  const char* name = "";
  std::vector<MatrixFormat> formats;
  std::vector<MatrixFormat> neighbors;  // in a layer
  std::vector<TestDevice> devices;      // which give the same bits
  double (*bound)(const ExactOutput& output) = nullptr;
  // A matrix, whose `values` are the weights as the kernels round them.
  Matrix (*random)(MatrixFormat format, int64_t rows, int64_t cols, uint32_t seed) = RandomMatrix;
  // Rounds rows of activations as the kernels do. Null: the bound covers their rounding.
  void (*round)(std::vector<float>& x) = nullptr;
  // 32 activations with the largest codes at a scale of 1: the first and the others. 0: none.
  float largest_codes[2] = {};
  bool embeds_same_bits = true;  // false: a zero may have another sign
  bool overflows = false;        // the largest float becomes infinite
  int min_rows = 1;              // that a weight must have in a step

  std::vector<int> threads = {1, 5};
  std::vector<int> group_threads = {2};
  std::vector<Call> calls = {{1},
                             {2, true, false},
                             {5, false, true},
                             {13, true, true},
                             {70},
                             {1, true, true},
                             {5, true, false},
                             {7, false, false, 0},
                             {17, false, true, 4},
                             {30, true, false}};
  std::vector<int64_t> outputs = {1, 16, 37, 130};
  std::vector<int64_t> odd_cols = {1, 31, 66, 77};  // of formats without blocks
  std::vector<int64_t> long_cols = {160, 832};      // of the others, beside 1 and 3 blocks
  std::vector<int> batches = {};                    // numbers of rows; empty: 1 to 70
  int64_t panel_outputs = 203, panel_cols = 320;
  int64_t block_outputs = 40, block_cols = 2048;
  int block_rows = 500;  // several row blocks
  int block_threads = 2;
  int64_t group_outputs = 150;
  int group_rows = 130;  // at most
  std::vector<int> part_rows = {1, 5, 12, 30, 40, 70};
};

struct Subject {
  const Arithmetic& arithmetic;
  MatrixFormat format;

  bool has_blocks() const { return !IsFloat(format) && !IsFp8(format); }
  bool has_codes() const { return has_blocks() && arithmetic.largest_codes[0] != 0; }
  int64_t block() const { return IsFp8(format) ? 32 : SourceBlockCols(format); }
  // Returns a matrix, whose columns are rounded up to whole blocks.
  Matrix Random(int64_t rows, int64_t cols, uint32_t seed) const {
    const int64_t whole = has_blocks() ? (cols + block() - 1) / block() * block() : cols;
    return arithmetic.random(format, rows, whole, seed);
  }
};

// Checks a property of every format with every arithmetic.
inline void ForSubjects(const std::vector<Arithmetic>& all, void (*check)(const Subject&)) {
  for (const Arithmetic& arithmetic : all) {
    for (MatrixFormat format : arithmetic.formats) {
      CAPTURE(arithmetic.name);
      CAPTURE(static_cast<int>(format));
      check({arithmetic, format});
    }
  }
}

// Calls fn(device, is_slow) for all devices of an arithmetic.
template <class Fn>
void ForDevices(const Subject& s, int threads, const Fn& fn) {
  for (const TestDevice& device : s.arithmetic.devices) {
    CAPTURE(device.name);
    CAPTURE(threads);
    fn(*device.make(threads), device.is_slow);
  }
}

// Returns rows of x.
inline std::vector<float> Rows(const std::vector<float>& x, int64_t cols,
                               const std::vector<int32_t>& rows) {
  std::vector<float> some;
  for (int32_t row : rows) {
    some.insert(some.end(), x.begin() + row * cols, x.begin() + (row + 1) * cols);
  }
  return some;
}

inline std::vector<ExactOutput> ExactOutputs(const Matrix& m, const std::vector<float>& x) {
  std::vector<ExactOutput> outputs;
  std::vector<double> largest(static_cast<size_t>(m.cols));
  for (auto row = x.begin(); row != x.end(); row += m.cols) {
    for (int64_t c = 0; c < m.cols; ++c) {
      const auto block = row + c / 32 * 32;
      const auto amax =
          std::max_element(block, std::min(block + 32, row + m.cols),
                           [](float a, float b) { return std::abs(a) < std::abs(b); });
      largest[static_cast<size_t>(c)] =
          c % 32 == 0 ? std::abs(*amax) : largest[static_cast<size_t>(c - 1)];
    }
    for (int64_t o = 0; o < m.rows; ++o) {
      ExactOutput out = {.cols = m.cols, .format = m.format};
      const double* w = m.values.data() + o * m.cols;
      for (int64_t c = 0; c < m.cols; ++c) {
        out.product += w[c] * row[c];
        out.magnitude += std::abs(w[c] * row[c]);
        out.sum_of_x += std::abs(row[c]);
        out.largest += std::abs(w[c]) * largest[static_cast<size_t>(c)];
      }
      outputs.push_back(out);
    }
  }
  return outputs;
}

// Checks the outputs of a call with the first rows.
inline void CheckOutputs(double (*bound)(const ExactOutput&), const std::vector<ExactOutput>& exact,
                         const std::vector<float>& bias, const std::vector<float>& y, Call call,
                         bool in_f32 = false) {
  for (size_t i = 0; i < y.size(); ++i) {
    ExactOutput out = exact[i];
    out.format = in_f32 ? MatrixFormat::kF32 : out.format;
    out.bias = call.bias;
    out.want = out.product + (call.bias ? bias[i % bias.size()] : 0.0) +
               (call.accumulate ? kSentinel : 0.0);
    if (!(std::abs(y[i] - out.want) <= bound(out))) {
      FAIL_CHECK("value " << i << " of " << y.size() << ": got " << y[i] << ", want " << out.want);
      return;
    }
  }
}

inline void CheckShape(const Subject& s, int64_t rows, int64_t cols, bool also_in_f32) {
  const Arithmetic& a = s.arithmetic;
  int num_rows = 0;
  for (const Call& call : a.calls) {
    num_rows = std::max(num_rows, call.num_rows);
  }
  const Matrix m = s.Random(rows, cols, static_cast<uint32_t>(rows + cols));
  const std::vector<float> x = RandomVector(num_rows * m.cols, 7);
  const std::vector<float> bias = RandomVector(rows, 8);
  std::vector<float> rounded = x;
  if (a.round != nullptr) {
    a.round(rounded);
  }
  const std::vector<ExactOutput> exact = ExactOutputs(m, rounded);
  CAPTURE(rows);
  CAPTURE(m.cols);
  ForDevices(s, 2, [&](Device& device, bool is_slow) {
    for (bool in_f32 : {false, true}) {
      if (in_f32 && !also_in_f32) {
        continue;
      }
      const auto weight = device.PackMatrix(m.source(), in_f32);
      for (const Call& call : a.calls) {
        if (in_f32 && is_slow && call.num_rows > 7) {
          continue;
        }
        CAPTURE(call.num_rows);
        CheckOutputs(a.bound, exact, bias, RunLinear(device, *weight, x, bias, call), call, in_f32);
      }
    }
  });
}

inline void AgreesWithDouble(const Subject& s) {
  const bool rounds = s.arithmetic.round == nullptr;
  const std::vector<int64_t> blocks = {s.block(), 3 * s.block()};
  for (int64_t rows : s.arithmetic.outputs) {
    for (int64_t cols : s.has_blocks() ? blocks : s.arithmetic.odd_cols) {
      CheckShape(s, rows, cols, rounds);
    }
    for (int64_t cols : s.arithmetic.long_cols) {
      if (rows < 40 && s.has_blocks() && cols > 3 * s.block()) {
        CheckShape(s, rows, cols, false);
      }
    }
  }
}

// A row has the same bits at every place in every batch, on all devices and with all numbers of
// threads.
inline void SameBitsInEveryBatch(const Subject& s) {
  const Arithmetic& a = s.arithmetic;
  std::vector<int> batches = a.batches;
  for (int n = 1; a.batches.empty() && n <= 70; ++n) {
    batches.push_back(n);
  }
  const int last = batches.back();
  const Matrix m = s.Random(a.panel_outputs, a.panel_cols, 3);
  const std::vector<float> x = RandomVector(last * m.cols, 4);
  const std::vector<float> bias = RandomVector(m.rows, 5);
  const auto first = a.devices[0].make(1);
  const auto want =
      RunLinear(*first, *first->PackMatrix(m.source(), false), x, bias, {last, true, true});
  for (int threads : a.threads) {
    ForDevices(s, threads, [&](Device& device, bool is_slow) {
      const auto weight = device.PackMatrix(m.source(), false);
      for (int n : batches) {
        if (is_slow && a.batches.empty() && n % 23 != 1) {
          continue;
        }
        std::vector<int32_t> rows;
        for (int r = 0; r < n; ++r) {
          rows.push_back(r * 37 % last);
        }
        CAPTURE(n);
        REQUIRE(SameBits(RunLinear(device, *weight, Rows(x, m.cols, rows), bias, {n, true, true}),
                         Rows(want, m.rows, rows)));
      }
    });
  }
}

inline void SameBitsInSeveralRowBlocks(const Subject& s) {
  const Arithmetic& a = s.arithmetic;
  const Matrix m = s.Random(a.block_outputs, a.block_cols, 11);
  const std::vector<float> x = RandomVector(a.block_rows * m.cols, 12);
  ForDevices(s, a.block_threads, [&](Device& device, bool is_slow) {
    if (is_slow) {
      return;
    }
    const auto weight = device.PackMatrix(m.source(), false);
    const auto all = RunLinear(device, *weight, x, {}, {a.block_rows});
    for (int first : {0, 11, 12, 133, a.block_rows - a.min_rows}) {
      std::vector<int32_t> rows;
      for (int r = 0; r < a.min_rows; ++r) {
        rows.push_back(first + r);
      }
      CHECK(SameBits(RunLinear(device, *weight, Rows(x, m.cols, rows), {}, {a.min_rows}),
                     Rows(all, m.rows, rows)));
    }
  });
}

// Weights with biases, of which rows are grouped, and the rows that each gives alone.
struct Experts {
  std::vector<std::unique_ptr<PackedMatrix>> weights;
  std::vector<std::unique_ptr<DeviceArray<float>>> biases;
  std::vector<LinearPart> parts;
  std::vector<std::vector<float>> many;  // of weights with at least min_rows rows in a step
  std::vector<std::vector<float>> few;   // of the others
};

inline Experts MakeExperts(const Subject& s, Device& device, int count, int64_t cols,
                           const std::vector<float>& x, int num_rows) {
  Experts experts;
  for (int i = 0; i < count; ++i) {
    const int64_t outputs = cols > 96 ? 50 : s.arithmetic.group_outputs;
    const Matrix m = s.Random(outputs, cols, static_cast<uint32_t>(i));
    const std::vector<float> bias = RandomVector(m.rows, static_cast<uint32_t>(70 + i));
    const Call call = {num_rows, i % 2 == 0};
    experts.weights.push_back(device.PackMatrix(m.source(), false));
    const PackedMatrix& weight = *experts.weights.back();
    experts.biases.push_back(std::make_unique<DeviceArray<float>>(device, bias));
    experts.parts.push_back({&weight, call.bias ? experts.biases.back()->data() : nullptr});
    experts.many.push_back(RunLinear(device, weight, x, bias, call));
    std::vector<float> few;
    for (int r = 0; r < num_rows && s.arithmetic.min_rows > 1; r += s.arithmetic.min_rows - 1) {
      const int n = std::min(num_rows - r, s.arithmetic.min_rows - 1);
      const std::vector<float> some(x.begin() + r * cols, x.begin() + (r + n) * cols);
      const auto y = RunLinear(device, weight, some, bias, {n, call.bias});
      few.insert(few.end(), y.begin(), y.end());
    }
    experts.few.push_back(few.empty() ? experts.many.back() : few);
  }
  return experts;
}

// Checks rows in groups of these sizes. `gathered`: they are not the first rows of x.
inline void CheckGroups(const Subject& s, Device& device, const Experts& experts,
                        const std::vector<float>& x, const std::vector<int>& sizes, bool gathered) {
  const int64_t cols = experts.weights[0]->cols;
  const auto num_x = static_cast<int>(static_cast<int64_t>(x.size()) / cols);
  const int64_t outputs = experts.weights[0]->rows;
  std::vector<int32_t> offsets = {0};
  std::vector<int32_t> x_rows;
  std::vector<float> want;
  for (size_t i = 0; i < sizes.size(); ++i) {
    const auto& alone = sizes[i] < s.arithmetic.min_rows ? experts.few[i] : experts.many[i];
    for (int r = offsets.back(); r < offsets.back() + sizes[i]; ++r) {
      x_rows.push_back(gathered ? (r * 37 + 3) % num_x : r);
      const auto row = Rows(alone, outputs, {x_rows.back()});
      want.insert(want.end(), row.begin(), row.end());
    }
    offsets.push_back(offsets.back() + sizes[i]);
  }
  constexpr int kPad = 3;
  const DeviceArray<float> from(device, Padded(x, cols, num_x, kPad, kNan));
  const DeviceArray<int32_t> rows(device, x_rows);
  const DeviceArray<int32_t> ends(device, offsets);
  const auto size = static_cast<size_t>(offsets.back() * (outputs + kPad));
  const DeviceArray<float> y(device, std::vector<float>(size, kSentinel));
  device.GroupedLinear({.x = from.data(),
                        .x_stride = cols + kPad,
                        .x_rows = gathered ? rows.data() : nullptr,
                        .y = y.data(),
                        .y_stride = outputs + kPad,
                        .experts = experts.parts.data(),
                        .num_experts = static_cast<int>(sizes.size()),
                        .offsets = ends.data(),
                        .num_rows = offsets.back()});
  REQUIRE(SameBits(Unpadded(y.Read(), outputs, kPad), want));
}

inline void GroupedRowsEqualOneRow(const Subject& s) {
  const std::vector<std::vector<int>> groupings = {
      {70, 0, 0, 0, 0}, {1, 1, 1, 1, 1},   {0, 13, 1, 0, 30}, {2, 12, 24, 11, 3},
      {5, 1, 17, 5, 0}, {0, 1, 13, 26, 0}, {33, 31, 0, 66, 0}};
  const int num_x = s.arithmetic.group_rows;
  const bool is_wide = s.block() > 32;
  for (int64_t cols : is_wide ? std::vector{s.block()} : std::vector{s.block(), 3 * s.block()}) {
    const std::vector<float> x = RandomVector(num_x * cols, 61);
    for (int threads : s.arithmetic.group_threads) {
      ForDevices(s, threads, [&](Device& device, bool) {
        const Experts experts = MakeExperts(s, device, 5, cols, x, num_x);
        for (const std::vector<int>& sizes : groupings) {
          for (bool gathered : {false, true}) {
            if (std::accumulate(sizes.begin(), sizes.end(), 0) <= num_x) {
              CheckGroups(s, device, experts, x, sizes, gathered);
            }
          }
        }
      });
    }
  }
}

// Matrices with the same number of columns give the bits in one layer that each gives alone: two of
// the format, one of each neighbor, and another of the format.
inline void PartsShareALayer(const Subject& s) {
  constexpr int64_t kCols = 256;
  std::vector<Matrix> matrices = {s.Random(40, kCols, 1), s.Random(7, kCols, 2)};
  for (MatrixFormat format : s.arithmetic.neighbors) {
    matrices.push_back(RandomMatrix(format, 7, kCols, 3));
  }
  matrices.push_back(s.Random(33, kCols, 4));
  if (s.format == MatrixFormat::kNvfp4) {
    matrices.back().factor = 0x1p3f;
  }
  const std::vector<float> x = RandomVector(70 * kCols, 61);
  ForDevices(s, 2, [&](Device& device, bool) {
    std::vector<std::unique_ptr<PackedMatrix>> weights;
    std::vector<const PackedMatrix*> parts;
    std::vector<std::vector<float>> biases;
    for (const Matrix& m : matrices) {
      weights.push_back(device.PackMatrix(m.source(), false));
      parts.push_back(weights.back().get());
      biases.push_back(weights.size() % 3 == 2 ? std::vector<float>() : RandomVector(m.rows, 9));
    }
    for (int num_rows : s.arithmetic.part_rows) {
      for (bool accumulate : {false, true}) {
        const Call call = {num_rows, true, accumulate};
        const auto y = RunParts(device, parts, biases, x, call);
        const auto stride = static_cast<int64_t>(y.size()) / num_rows;
        int64_t first = 0;
        for (size_t i = 0; i < parts.size(); ++i) {
          const auto alone = RunParts(device, {parts[i]}, {biases[i]}, x, call);
          for (int64_t r = 0; r < num_rows; ++r) {
            const auto begin = y.begin() + r * stride + first;
            REQUIRE(SameBits({begin, begin + parts[i]->rows},
                             Rows(alone, parts[i]->rows, {static_cast<int32_t>(r)})));
          }
          first += parts[i]->rows;
        }
      }
    }
  });
}

// NaN and infinite activations make all outputs of their row non-finite, and no others.
inline void PoisonStaysInItsRow(const Subject& s) {
  const int num_rows = s.arithmetic.min_rows + 8;
  const Matrix m = s.Random(40, 256, 21);
  const std::vector<float> clean = RandomVector(num_rows * m.cols, 22);
  std::vector<float> poisons = {kNan, kInf, -kInf};
  if (s.arithmetic.overflows) {
    poisons.push_back(std::numeric_limits<float>::max());
  }
  ForDevices(s, 1, [&](Device& device, bool) {
    const auto weight = device.PackMatrix(m.source(), false);
    for (int n : {3, num_rows}) {  // fewer rows may have other kernels
      const auto want = RunLinear(device, *weight, clean, {}, {n});
      for (float poison : poisons) {
        for (int64_t row : {0, n / 2, n - 1}) {
          std::vector<float> x = clean;
          x[static_cast<size_t>(row * m.cols + 33)] = poison;
          const auto y = RunLinear(device, *weight, x, {}, {n});
          const bool must_be_bad = !std::isfinite(poison) || n >= s.arithmetic.min_rows;
          for (size_t i = 0; i < y.size(); ++i) {
            const bool own = static_cast<int64_t>(i) / m.rows == row;
            REQUIRE((own ? !must_be_bad || !std::isfinite(y[i]) : y[i] == want[i]));
          }
        }
      }
    }
  });
}

// A scale that is NaN or infinite makes its output non-finite, and no others.
inline void BadScaleStaysInItsOutput(const Subject& s) {
  if (!s.has_blocks() || s.format == MatrixFormat::kNvfp4) {
    return;  // without scales, or with numbers alone
  }
  const int num_rows = s.arithmetic.min_rows + 12;
  const Matrix clean = s.Random(40, 512, 23);
  const std::vector<float> x = RandomVector(num_rows * clean.cols, 24);
  ForDevices(s, 1, [&](Device& device, bool) {
    const auto run = [&](const Matrix& m) {
      return RunLinear(device, *device.PackMatrix(m.source(), false), x, {}, {num_rows});
    };
    const auto want = run(clean);
    for (int upper : {0x7c, 0x7e, 0xfc}) {
      for (int64_t output : {5, 17}) {
        Matrix m = clean;
        SetScale(m, output, static_cast<uint8_t>(IsMxfp4(s.format) ? 255 : upper));
        const auto y = run(m);
        for (size_t i = 0; i < y.size(); ++i) {
          const bool own = static_cast<int64_t>(i) % m.rows == output;
          REQUIRE((own ? !std::isfinite(y[i]) : y[i] == want[i]));
        }
      }
    }
  });
}

inline void ScalesOfActivationsDoNotOverflow(const Subject& s) {
  const Matrix m = s.Random(16, 32, 31);
  ForDevices(s, 1, [&](Device& device, bool) {
    const auto weight = device.PackMatrix(m.source(), false);
    for (float magnitude : {0.f, 1e-44f, 1e-37f, 1e-30f, 1e34f}) {
      const int num_rows = s.arithmetic.min_rows;
      const std::vector<float> x(static_cast<size_t>(num_rows * m.cols), magnitude);
      for (float y : RunLinear(device, *weight, x, {}, {num_rows})) {
        REQUIRE(std::isfinite(y));
        REQUIRE((magnitude > 0 || y == 0));
      }
    }
  });
}

// Returns a matrix of one block whose codes, scales and minima are the largest, or whose codes are
// the smallest. All numbers in FP16 and all powers of two are 1.
inline Matrix ExtremeMatrix(MatrixFormat format, int64_t rows, bool largest) {
  Matrix m{format, rows, SourceBlockCols(format), {}, {}};
  const auto codes = static_cast<uint8_t>(largest ? 0xff : 0);
  for (int64_t row = 0; row < rows; ++row) {
    uint8_t code = codes;
    if (format == MatrixFormat::kQ6_K) {
      m.bytes.insert(m.bytes.end(), 192, codes);
      m.bytes.insert(m.bytes.end(), 16, 0x80);  // -128
      Append(m.bytes, Half(1));
    } else if (IsMxfp4(format)) {
      code = largest ? 0x77 : 0xff;  // 6 and -6
      (format == MatrixFormat::kMxfp4 ? m.bytes : m.scales).push_back(127);
    } else if (format == MatrixFormat::kNvfp4) {
      code = largest ? 0x77 : 0xff;
      m.bytes.insert(m.bytes.end(), 4, 0x7e);  // 448
    } else {
      Append(m.bytes, Half(1));
      if (HasMinimum(format)) {
        Append(m.bytes, IsKQuant(format) ? Half(1) : uint16_t{0});
      }
      m.bytes.insert(m.bytes.end(), IsKQuant(format) ? 12 : 0, 0xff);
      code = format == MatrixFormat::kQ8_0 ? static_cast<uint8_t>(largest ? 127 : -128) : codes;
    }
    m.bytes.resize(static_cast<size_t>((row + 1) * SourceBlockBytes(format)), code);
  }
  return m;
}

inline void ExtremesAreExact(const Subject& s) {
  if (!s.has_codes()) {
    return;
  }
  constexpr int kRows = 13;  // a panel of 12 and one row
  const auto& [first, others] = s.arithmetic.largest_codes;
  for (bool largest : {false, true}) {
    const Matrix m = ExtremeMatrix(s.format, 17, largest);
    std::vector<float> weights(static_cast<size_t>(m.cols));
    DequantizeMatrixRow(m.source(), 0, weights.data());
    for (float sign : {1.f, -1.f}) {
      std::vector<float> x(static_cast<size_t>(kRows * m.cols), sign * others);
      for (size_t at = 0; at < x.size(); at += 32) {
        x[at] = sign * first;
      }
      double want = 0;
      for (size_t c = 0; c < weights.size(); ++c) {
        want += double{weights[c]} * x[c];
      }
      ForDevices(s, 1, [&](Device& device, bool) {
        for (float y : RunLinear(device, *device.PackMatrix(m.source(), false), x, {}, {kRows})) {
          // The sums of several blocks are added in FP32.
          REQUIRE((m.cols == 32 ? y == static_cast<float>(want)
                                : std::abs(y - want) <= std::abs(want) * 0x1p-20));
        }
      });
    }
  }
}

// A row of the definition has the exact values, and embedding gives its bits.
inline void EmbedsExactly(const Subject& s) {
  const std::vector<int64_t> odd = {1, 77, 320};
  const std::vector<int64_t> blocks = {3 * s.block(), 704 / s.block() * s.block()};
  for (int64_t cols : s.has_blocks() ? blocks : odd) {
    const Matrix m = RandomMatrix(s.format, 50, cols, 41);
    std::vector<float> table(static_cast<size_t>(m.rows * m.cols));
    std::vector<int32_t> ids;
    for (int64_t row = 0; row < m.rows; ++row) {
      DequantizeMatrixRow(m.source(), row, table.data() + row * m.cols);
      ids.push_back(static_cast<int32_t>(row * 37 % m.rows));
    }
    ids.push_back(7);
    REQUIRE(std::equal(table.begin(), table.end(), m.values.begin(),
                       [](float got, double want) { return got == static_cast<float>(want); }));
    ForDevices(s, 2, [&](Device& device, bool) {
      for (bool exact : {false, true}) {
        const auto packed = device.PackMatrix(m.source(), exact);
        CHECK((packed->format == MatrixFormat::kF32) == (exact || s.format == MatrixFormat::kF32));
        const auto want = Rows(table, m.cols, ids);
        const DeviceArray<int32_t> from(device, ids);
        const DeviceArray<float> out(device, std::vector<float>(want.size(), kSentinel));
        device.Embed({packed.get(), from.data(), out.data(), static_cast<int>(ids.size())});
        REQUIRE((s.arithmetic.embeds_same_bits ? SameBits(out.Read(), want) : out.Read() == want));
      }
    });
  }
}

inline void RejectsBadSources(const Subject& s) {
  const std::vector<uint8_t> bytes(8192);
  const void* data = bytes.data();
  const bool has_scales = s.format == MatrixFormat::kMxfp4Split || IsFp8(s.format);
  const std::vector<float> ones(64, 1.f);
  const void* scales = has_scales ? ones.data() : nullptr;
  const auto refuses = [&](const MatrixSource& source) {
    ForDevices(s, 1, [&](Device& device, bool) {
      for (bool exact : {false, true}) {
        CHECK_THROWS_AS(device.PackMatrix(source, exact), InvalidArgument);
      }
    });
  };
  for (int64_t cols = 1; s.has_blocks() && cols < 2 * s.block(); ++cols) {
    if (cols % s.block() != 0) {
      refuses({s.format, data, 4, cols, scales});
    }
  }
  refuses({s.format, data, 0, s.block(), scales});
  refuses({s.format, nullptr, 4, s.block(), scales});
  refuses({s.format, data, 4, s.block(), scales == nullptr ? data : nullptr});
  std::vector<float> factors = {2.f};
  if (s.format == MatrixFormat::kNvfp4) {
    factors = {0.f, -1.f, kNan, kInf, 1e36f};
  }
  for (float factor : factors) {
    refuses({s.format, data, 4, s.block(), scales, factor});
  }
}

}  // namespace turbomind::testing
