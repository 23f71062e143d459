#pragma once

// Attention over a small cache, in chunks of any size, and a reference in double precision, for the
// tests of the attention ops.

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "cpu/kv_fixture.h"
#include "kv/first_seen.h"
#include "kv/format_pairs.h"
#include "turbomind/backend/cpu/cpu_device.h"
#include "turbomind/backend/cpu/cpu_kv_ops.h"
#include "turbomind/ops/attention.h"

namespace turbomind {

inline constexpr float kSentinel = 12345.f;
// Largest error against double precision, relative to the largest |v|: FP32 sums of up to 333
// weights and 256 products (observed below 4e-6). Affine codes lose digits by cancellation: code *
// scale is up to 2^bits times finer than the zero point that it is added to.
inline constexpr double kMaxError = 1e-5;
inline constexpr double kMaxErrorAffine = 3e-5;
// The limit for queries and weights rounded to 16 bits (isa/attention/attention_integer.h).
// Observed: below 1.1e-4, with head_dim 16.
inline constexpr double kMaxErrorRounded = 2e-4;

struct Case {
  CacheShape shape;
  int group = 3;
  int window = 0;
  bool sinks = false;
  int first = 200;  // queries are positions [first, context)
  PrecisionWindowTokens window16;
  KvCacheMode window_format = KvCacheMode::kNone;
  bool mean = false;  // K has a mean subtracted: sinks are lowered
  bool exact = true;
  float score_cap = 0.f;
  int fast_pairs = 0;  // FastBias::num_pairs
};

// The layer's quantized pool and its window with the same rows.
struct Caches {
  explicit Caches(const Case& c, uint8_t poison = 0xff)
      : quantized(c.shape, poison),
        window16(Window16Shape(c), poison),
        rule(MakePrecisionWindow(c.window16, c.shape.block_seq_len)) {}

  static CacheShape Window16Shape(const Case& c) {
    CacheShape window16 = c.shape;
    window16.k = window16.v = c.window_format;
    window16.first_block = 2;
    return window16;
  }
  // Returns a row as the query at `position` sees it.
  const float* Decoded(KvSide side, int head, int token, int position) {
    const bool is_in_window16 =
        rule.enabled() && rule.IsInWindow16(token / quantized.shape().block_seq_len, position);
    return (is_in_window16 ? window16 : quantized).Decoded(side, head, token);
  }

  TestCache quantized;
  TestCache window16;
  PrecisionWindow rule;
};

struct Inputs {
  std::vector<float> q;  // [context, q_heads, head_dim]; rows before `first` are not read
  std::vector<float> sinks;
  std::vector<float> q_dot_mean;  // [context, q_heads]
  // FastBias of arbitrary waves. There is one more than a head has pairs, and each leaves out
  // another.
  std::vector<float> directions;
  std::vector<int32_t> waves_of;
  std::vector<float> waves;
  int64_t num_positions = 0;

  FastBias fast_bias(const Case& c) const {
    return {c.fast_pairs, directions.data(), waves_of.data(), waves.data(), num_positions};
  }
};

inline Inputs MakeInputs(const Case& c) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  Inputs in;
  const int q_heads = c.group * c.shape.kv_heads;
  in.q.resize(static_cast<size_t>(c.shape.context) * q_heads * c.shape.head_dim);
  for (float& x : in.q) {
    x = normal(random);
  }
  for (int h = 0; h < q_heads; ++h) {
    in.sinks.push_back(normal(random) + 4.f);  // large, so that the test fails if a sink is dropped
  }
  for (int i = 0; i < c.shape.context * q_heads; ++i) {
    in.q_dot_mean.push_back(4.f * normal(random));
  }
  const int num_directions = c.shape.kv_heads * c.fast_pairs * 2;
  for (int i = 0; i < num_directions * c.shape.head_dim; ++i) {
    in.directions.push_back(1.5f * normal(random));
  }
  for (int i = 0; i < c.shape.kv_heads * c.fast_pairs; ++i) {
    in.waves_of.push_back((i / c.fast_pairs + i % c.fast_pairs + 1) % (c.fast_pairs + 1));
  }
  in.num_positions = (c.shape.context + kTileTokens - 1) / kTileTokens * kTileTokens;
  for (int64_t i = 0; i < (c.fast_pairs + 1) * 2 * in.num_positions; ++i) {
    in.waves.push_back(normal(random));
  }
  return in;
}

// The parameters that all steps of one run share.
struct Run {
  const CpuKvKernels& kernels;
  ThreadPool& pool;
  const Case& c;
  Caches& caches;
  const Inputs& in;
  Device* device = nullptr;  // runs the op instead of the kernels if it is set
};

// The block tables of one step. Each holds only the blocks that some query of [begin, begin +
// count) sees in that pool.
struct StepTables {
  std::vector<int32_t> quantized;
  std::vector<int32_t> window16;
};

inline StepTables TablesOf(const Run& run, int begin, int count) {
  const Case& c = run.c;
  if (!run.caches.rule.enabled()) {
    return {run.caches.quantized.table(), {}};
  }
  const size_t blocks = run.caches.quantized.table().size();
  StepTables tables = {std::vector<int32_t>(blocks, -1), std::vector<int32_t>(blocks, -1)};
  for (int position = begin; position < begin + count; ++position) {
    const auto first = static_cast<int>(FirstSeen(c.window, position));
    for (int t = first; t <= position; ++t) {
      const auto block = static_cast<size_t>(t / c.shape.block_seq_len);
      if (run.caches.rule.IsInWindow16(static_cast<int64_t>(block), position)) {
        tables.window16[block] = run.caches.window16.table()[block];
      } else {
        tables.quantized[block] = run.caches.quantized.table()[block];
      }
    }
  }
  return tables;
}

// Runs attention for the queries [begin, begin + count) as one step.
inline void RunStep(const Run& run, int begin, int count, float* out) {
  const Case& c = run.c;
  const int q_heads = c.group * c.shape.kv_heads;
  const int32_t cu_seqlens[2] = {0, count};
  const int32_t context = begin + count;
  std::vector<int32_t> positions(count);
  std::iota(positions.begin(), positions.end(), begin);
  AttentionParams p;
  p.q_stride = static_cast<int64_t>(q_heads) * c.shape.head_dim;
  p.q = run.in.q.data() + begin * p.q_stride;
  p.out = out;
  p.q_heads = q_heads;
  p.softmax_scale = 1.f / std::sqrt(static_cast<float>(c.shape.head_dim));
  p.score_cap = c.score_cap;
  p.exact = c.exact;
  p.window = c.window;
  p.sinks = c.sinks ? run.in.sinks.data() : nullptr;
  p.q_dot_mean = c.mean ? run.in.q_dot_mean.data() + begin * q_heads : nullptr;
  p.fast_bias = run.in.fast_bias(c);
  p.kv = run.caches.quantized.view();
  p.rule = run.caches.rule;
  const StepTables tables = TablesOf(run, begin, count);
  p.batch = {1,
             count == 1 ? 1 : 0,
             count,
             cu_seqlens,
             &context,
             positions.data(),
             tables.quantized.data(),
             static_cast<int64_t>(tables.quantized.size())};
  if (p.rule.enabled()) {
    p.window16 = run.caches.window16.view();
    p.batch.window16_tables = tables.window16.data();
  }
  CpuKvScratch memory;
  if (run.device != nullptr) {
    invokePrefillAttention(*run.device, p);
  } else if (count == 1) {
    CpuDecodeAttention(run.kernels, run.pool, memory, p);
  } else {
    CpuPrefillAttention(run.kernels, run.pool, memory, p);
  }
}

inline std::vector<float> RunChunks(const CpuKvKernels& kernels, ThreadPool& pool, const Case& c,
                                    Caches& caches, const Inputs& in, int chunk) {
  const int64_t row = static_cast<int64_t>(c.group) * c.shape.kv_heads * c.shape.head_dim;
  std::vector<float> out(static_cast<size_t>((c.shape.context - c.first) * row) + 1, kSentinel);
  for (int begin = c.first; begin < c.shape.context; begin += chunk) {
    const int count = std::min(chunk, c.shape.context - begin);
    RunStep({kernels, pool, c, caches, in}, begin, count, out.data() + (begin - c.first) * row);
  }
  CHECK(out.back() == kSentinel);
  out.pop_back();
  return out;
}

inline bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// Computes plain attention of one query head in double precision over decoded rows.
inline std::vector<double> Reference(const Case& c, Caches& caches, const Inputs& in, int position,
                                     int q_head) {
  const int dim = c.shape.head_dim;
  const int head = q_head / c.group;
  const int q_heads = c.group * c.shape.kv_heads;
  const float* q = in.q.data() + (static_cast<int64_t>(position) * q_heads + q_head) * dim;
  const auto begin = static_cast<int>(FirstSeen(c.window, position));
  const double scale = 1.f / std::sqrt(static_cast<float>(dim));
  const double shift =
      c.mean ? scale * in.q_dot_mean[static_cast<size_t>(position * q_heads + q_head)] : 0;
  const double sink = in.sinks[static_cast<size_t>(q_head)] - shift;
  std::vector<double> scores;
  double largest = c.sinks ? sink : -1e300;
  for (int t = begin; t <= position; ++t) {
    const float* k = caches.Decoded(KvSide::kK, head, t, position);
    double score = 0;
    for (int d = 0; d < dim; ++d) {
      score += static_cast<double>(q[d]) * k[d];
    }
    for (int wave = 0; wave < 2 * c.fast_pairs; ++wave) {
      const int pair = head * c.fast_pairs + wave / 2;
      const float* direction = in.directions.data() + (2 * pair + wave % 2) * dim;
      const double amplitude = std::inner_product(q, q + dim, direction, 0.);
      const auto row = 2 * in.waves_of[static_cast<size_t>(pair)] + wave % 2;
      score += amplitude * in.waves[static_cast<size_t>(row * in.num_positions + t)];
    }
    const double cap = c.score_cap;
    scores.push_back(cap > 0 ? cap * std::tanh(score * scale / cap) : score * scale);
    largest = std::max(largest, scores.back());
  }
  double total = c.sinks ? std::exp(sink - largest) : 0;
  std::vector<double> out(dim, 0.0);
  for (int t = begin; t <= position; ++t) {
    const double weight = std::exp(scores[t - begin] - largest);
    total += weight;
    for (int d = 0; d < dim; ++d) {
      out[d] += weight * caches.Decoded(KvSide::kV, head, t, position)[d];
    }
  }
  for (double& x : out) {
    x /= total;
  }
  return out;
}

// Returns the largest error of a sample of queries, relative to the largest |v|.
inline double ErrorOf(const Case& c, Caches& caches, const Inputs& in,
                      const std::vector<float>& out) {
  const int q_heads = c.group * c.shape.kv_heads;
  const int dim = c.shape.head_dim;
  double largest = 0;
  double error = 0;
  for (int t = 0; t < c.shape.context; ++t) {
    for (int d = 0; d < dim; ++d) {
      largest = std::max<double>(largest, std::fabs(caches.window16.Decoded(KvSide::kV, 0, t)[d]));
    }
  }
  for (int position = c.first; position < c.shape.context; position += 19) {
    for (int h = 0; h < q_heads; ++h) {
      const std::vector<double> want = Reference(c, caches, in, position, h);
      const float* got =
          out.data() + (static_cast<int64_t>(position - c.first) * q_heads + h) * dim;
      for (int d = 0; d < dim; ++d) {
        const double difference = std::fabs(got[d] - want[d]);
        error = std::max(error, std::isnan(difference) ? 1e300 : difference);
      }
    }
  }
  return error / largest;
}

inline bool Affine(const FormatPair& pair) {
  return pair.k == KvCacheMode::kInt8 || pair.k == KvCacheMode::kInt4;
}

inline bool HasIntegers(KvCacheMode format) {
  return format == KvCacheMode::kInt8 || format == KvCacheMode::kInt4 ||
         format == KvCacheMode::kFp4Mx || format == KvCacheMode::kFp4Nv;
}

inline std::string Name(const Case& c, const std::string& isa) {
  return isa + " k=" + ToString(c.shape.k) + " v=" + ToString(c.shape.v) + " " +
         ToString(c.shape.dtype) + " dim=" + std::to_string(c.shape.head_dim) +
         " group=" + std::to_string(c.group) + " window=" + std::to_string(c.window) +
         " sinks=" + std::to_string(c.sinks) + " block=" + std::to_string(c.shape.block_seq_len) +
         (c.exact ? " exact" : " rounded") + (c.shape.k_offset ? " offsets" : "") +
         (c.fast_pairs > 0 ? " fast pairs" : "") + " window of " + ToString(c.window_format) + "=" +
         std::to_string(c.window16.sink_tokens) + "," + std::to_string(c.window16.recent_tokens);
}

// Checks that every chunk size returns the same bits, close to double precision. Returns the bits.
inline std::vector<float> CheckBits(const Case& c, const std::string& isa, double limit) {
  INFO(Name(c, isa));
  ThreadPool pool(2);
  const CpuKvKernels kernels = CpuKvKernelsFor(isa);
  Caches caches(c);
  const Inputs in = MakeInputs(c);
  const std::vector<float> whole = RunChunks(kernels, pool, c, caches, in, c.shape.context);
  for (int chunk : {1, 16, 64}) {
    INFO("chunk " << chunk);
    CHECK(SameBits(whole, RunChunks(kernels, pool, c, caches, in, chunk)));
  }
  CHECK(ErrorOf(c, caches, in, whole) < limit);
  return whole;
}

// Checks the FP32 kernels and, for integer codes, the integer kernels. Returns the bits of both.
inline std::vector<float> CheckCase(Case c, const std::string& isa, bool affine) {
  c.exact = true;
  std::vector<float> bits = CheckBits(c, isa, affine ? kMaxErrorAffine : kMaxError);
  if (HasIntegers(c.shape.k) || HasIntegers(c.shape.v)) {
    c.exact = false;
    const std::vector<float> rounded = CheckBits(c, isa, kMaxErrorRounded);
    bits.insert(bits.end(), rounded.begin(), rounded.end());
  }
  return bits;
}

inline std::string BestIsa() { return AvailableCpuIsas().back(); }

// Returns a case of blocks of one length that reads the window and the quantized pool.
inline Case BlockCase(const FormatPair& pair, int dim, int block) {
  Case c;
  c.shape.k = pair.k;
  c.shape.v = pair.v;
  c.shape.head_dim = dim;
  c.shape.block_seq_len = block;
  c.shape.context = block == 64 ? 600 : 333;
  c.first = c.shape.context - 140;
  c.window16 = {64, 64};
  return c;
}

// Checks that a short case has the same bits with every instruction set, in FP32 and in integers.
inline void CheckEveryIsa(Case c) {
  c.shape.context = 290;
  c.first = 270;
  for (bool exact : {false, true}) {
    c.exact = exact;
    ThreadPool pool(1);
    Caches caches(c);
    const Inputs in = MakeInputs(c);
    const std::vector<float> want = RunChunks(CpuKvKernelsFor(BestIsa()), pool, c, caches, in, 64);
    for (const std::string& isa : AvailableCpuIsas()) {
      INFO(Name(c, isa));
      CHECK(SameBits(want, RunChunks(CpuKvKernelsFor(isa), pool, c, caches, in, 64)));
    }
  }
}

}  // namespace turbomind
