#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cpu/kv_fixture.h"
#include "sanitized_sample.h"
#include "turbomind/backend/cpu/cpu_device.h"
#include "turbomind/core/check.h"
#include "turbomind/ops/attention.h"
#include "turbomind/ops/flatten_kv.h"
#include "turbomind/ops/process_kv.h"
#include "turbomind/ops/quantize_blocks.h"

namespace turbomind {
namespace {

constexpr int kQHeads = 4;
constexpr int kHeads = 2;
constexpr int kGroup = kQHeads / kHeads;
constexpr int kAllHeads = kQHeads + 2 * kHeads;
constexpr HotTokens kBalanced = {64, 64};

std::vector<float> RandomRow(std::mt19937& random, size_t n, float mean = 0.f) {
  std::normal_distribution<float> normal(mean);
  std::vector<float> row(n);
  for (float& x : row) {
    x = normal(random);
  }
  return row;
}

// One sequence: rows of Q, K and V, as they come, for `context` tokens.
struct Sequence {
  Sequence(const CacheShape& shape, unsigned seed) : dim(shape.head_dim) {
    std::mt19937 random(seed);
    qkv = RandomRow(random, static_cast<size_t>(shape.context) * kAllHeads * dim);
    mean = RandomRow(random, static_cast<size_t>(kHeads) * dim, 2.f);
    sinks = RandomRow(random, kQHeads);
    q_dot_mean.assign(static_cast<size_t>(shape.context) * kQHeads, -1.f);
    positions.resize(static_cast<size_t>(shape.context));
    std::iota(positions.begin(), positions.end(), 0);
  }
  float* Row(int token, int head) {
    return qkv.data() + (static_cast<int64_t>(token) * kAllHeads + head) * dim;
  }

  int dim;
  std::vector<float> qkv;
  std::vector<float> mean;
  std::vector<float> sinks;
  std::vector<float> q_dot_mean;
  std::vector<int32_t> positions;
};

struct Ingredients {
  bool rotate = false;
  bool search = false;
  bool mean = false;
  HotTokens hot;
};

// Cold and hot pool of one layer, empty, and the ops of one step over them.
class Layer {
 public:
  Layer(const CacheShape& shape, const Ingredients& with, const std::string& isa = "")
      : with_(with),
        rule_(MakeHotRule(with.hot, shape.block_seq_len)),
        device_(MakeCpuDevice(2, isa)),
        cold_(shape, 0xff),
        hot_(HotShape(shape), 0xff) {
    std::fill(cold_.data().begin(), cold_.data().end(), std::byte{0xff});
    std::fill(cold_.scales().begin(), cold_.scales().end(), std::byte{0xff});
    std::fill(hot_.data().begin(), hot_.data().end(), std::byte{0xff});
    hot_table_.assign(hot_.table().size(), -1);
    cold_table_ = rule_.enabled() ? std::vector<int32_t>(cold_.table().size(), -1) : cold_.table();
  }

  // Tokens [begin, end) as one step: write, move, attend. Tables hold what the step needs and no
  // more. Returns the attention's output.
  std::vector<float> Step(Sequence& sequence, int begin, int end) {
    const int32_t cu_seqlens[2] = {0, end - begin};
    const int32_t context = end;
    const std::vector<BlockMove> moves = Plan(begin, end);
    BatchView batch = {1,        end - begin == 1 ? 1 : 0,         end - begin, cu_seqlens,
                       &context, sequence.positions.data() + begin};
    batch.block_tables = cold_table_.data();
    batch.hot_tables = rule_.enabled() ? hot_table_.data() : nullptr;
    batch.block_table_stride = static_cast<int64_t>(cold_table_.size());
    batch.moves = moves.data();
    batch.num_moves = static_cast<int>(moves.size());
    Write(sequence, begin, batch);
    if (rule_.enabled()) {
      QuantiseBlocksParams p;
      p.kv = cold_.view();
      p.hot = hot_.view();
      p.search_scales = with_.search;
      p.moves = batch.moves;
      p.num_moves = batch.num_moves;
      p.num_clipped = &num_clipped_;
      invokeQuantiseBlocks(*device_, p);
    }
    const std::vector<float> out = Attend(sequence, begin, batch);
    Release(moves);
    return out;
  }

  void Flatten(std::vector<float>& k, std::vector<float>& v, const int32_t& context) {
    const CacheShape& shape = cold_.shape();
    static const int32_t cu_seqlens[2] = {0, 1};
    const size_t size = static_cast<size_t>(kHeads) * context * shape.head_dim;
    k.assign(size, -1.f);
    v.assign(size, -1.f);
    last_ = context - 1;
    FlattenKVParams f;
    f.k = k.data();
    f.v = v.data();
    f.max_len = context;
    f.kv = cold_.view();
    f.batch = {1, 1, 1, cu_seqlens, &context, &last_};
    f.batch.block_tables = cold_table_.data();
    f.batch.block_table_stride = static_cast<int64_t>(cold_table_.size());
    if (rule_.enabled()) {
      f.hot = hot_.view();
      f.rule = rule_;
      f.batch.hot_tables = hot_table_.data();
    }
    invokeFlattenKV_v2(*device_, f);
  }

  const HotRule& rule() const { return rule_; }
  TestCache& cold() { return cold_; }
  int64_t num_nonfinite() const { return num_nonfinite_; }
  int64_t num_clipped() const { return num_clipped_; }

 private:
  static CacheShape HotShape(CacheShape shape) {
    shape.k = shape.v = KvCacheMode::kNone;
    shape.first_block = 2;
    return shape;
  }

  // Gives the new tokens hot blocks; returns those that leave the recent window of the last query.
  std::vector<BlockMove> Plan(int begin, int end) {
    std::vector<BlockMove> moves;
    if (!rule_.enabled()) {
      return moves;
    }
    const int length = rule_.block_seq_len;
    for (int block = begin / length; block * length < end; ++block) {
      hot_table_[static_cast<size_t>(block)] = hot_.table()[static_cast<size_t>(block)];
    }
    for (int block = rule_.sink_blocks; block * length < rule_.RecentBegin(end - 1); ++block) {
      const auto i = static_cast<size_t>(block);
      if (cold_table_[i] < 0) {
        cold_table_[i] = cold_.table()[i];
        moves.push_back({hot_table_[i], cold_table_[i]});
      }
    }
    return moves;
  }

  void Write(Sequence& sequence, int begin, const BatchView& batch) {
    ProcessKVParams p;
    p.qkv = sequence.Row(begin, 0);
    p.q_heads = kQHeads;
    p.rotate = with_.rotate;
    p.search_scales = with_.search;
    p.k_mean = with_.mean ? sequence.mean.data() : nullptr;
    p.q_dot_mean = sequence.q_dot_mean.data() + static_cast<int64_t>(begin) * kQHeads;
    p.kv = cold_.view();
    p.batch = batch;
    if (rule_.enabled()) {
      p.hot = hot_.view();
    }
    p.num_nonfinite = &num_nonfinite_;
    p.num_clipped = &num_clipped_;
    invokeProcessKV_v2(*device_, p);
  }

  std::vector<float> Attend(Sequence& sequence, int begin, const BatchView& batch) {
    const int64_t row = static_cast<int64_t>(kQHeads) * sequence.dim;
    std::vector<float> out(static_cast<size_t>(batch.num_tokens * row), -1.f);
    AttentionParams p;
    p.q = sequence.Row(begin, 0);
    p.q_stride = static_cast<int64_t>(kAllHeads) * sequence.dim;
    p.out = out.data();
    p.q_heads = kQHeads;
    p.softmax_scale = 1.f / std::sqrt(static_cast<float>(sequence.dim));
    p.sinks = sequence.sinks.data();
    p.q_dot_mean =
        with_.mean ? sequence.q_dot_mean.data() + static_cast<int64_t>(begin) * kQHeads : nullptr;
    p.kv = cold_.view();
    p.rule = rule_;
    if (rule_.enabled()) {
      p.hot = hot_.view();
    }
    p.batch = batch;
    dispatchDecoding(*device_, p);
    invokePrefillAttention(*device_, p);
    return out;
  }

  // Moved blocks give their hot slots back; what is left there must not matter.
  void Release(const std::vector<BlockMove>& moves) {
    for (const BlockMove& move : moves) {
      std::fill_n(hot_.view().data + move.hot * hot_.view().block_bytes, hot_.view().block_bytes,
                  std::byte{0xff});
      std::replace(hot_table_.begin(), hot_table_.end(), move.hot, -1);
    }
  }

  Ingredients with_;
  HotRule rule_;
  std::unique_ptr<Device> device_;
  TestCache cold_;
  TestCache hot_;
  std::vector<int32_t> cold_table_;
  std::vector<int32_t> hot_table_;
  int64_t num_nonfinite_ = 0;
  int64_t num_clipped_ = 0;
  int32_t last_ = 0;
};

std::vector<float> RunSteps(Layer& layer, Sequence& sequence, int context, int chunk) {
  std::vector<float> out;
  for (int begin = 0; begin < context; begin += chunk) {
    const std::vector<float> step = layer.Step(sequence, begin, std::min(context, begin + chunk));
    out.insert(out.end(), step.begin(), step.end());
  }
  return out;
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

CacheShape Shape(KvCacheMode mode, int dim, int block = 64, int context = 300) {
  CacheShape shape;
  shape.k = shape.v = mode;
  shape.head_dim = dim;
  shape.kv_heads = kHeads;
  shape.block_seq_len = block;
  shape.context = context;
  return shape;
}

// --- Rotation and mean ------------------------------------------------------------------------

// Normalised Hadamard matrix over runs: (-1)^popcount(i & j) / sqrt(size).
std::vector<double> Rotated(const std::vector<float>& x, int size) {
  std::vector<double> y(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    const size_t run = i / static_cast<size_t>(size) * static_cast<size_t>(size);
    for (size_t j = 0; j < static_cast<size_t>(size); ++j) {
      const int sign = __builtin_popcount(static_cast<unsigned>((i - run) & j)) % 2;
      y[i] += (sign ? -1.0 : 1.0) * x[run + j] / std::sqrt(static_cast<double>(size));
    }
  }
  return y;
}

TEST_CASE("Q and K are rotated, the mean is taken off K before, V stays") {
  for (const std::string& isa : AvailableCpuIsas()) {
    for (const auto& [dim, size] : {std::pair(64, 64), std::pair(80, 16), std::pair(96, 32),
                                    std::pair(128, 128), std::pair(256, 256), std::pair(48, 16)}) {
      CHECK(RotationSize(dim) == size);
      const CacheShape shape = Shape(KvCacheMode::kNone, dim, 16, 7);
      Sequence sequence(shape, 3);
      const Sequence before = sequence;
      Layer layer(shape, {true, false, true, {}}, isa);
      layer.Step(sequence, 0, 7);
      double error = 0;
      double dot_error = 0;
      for (int token = 0; token < 7; ++token) {
        for (int head = 0; head < kAllHeads; ++head) {
          const float* in = before.qkv.data() + (token * kAllHeads + head) * dim;
          std::vector<float> row(in, in + dim);
          const bool is_key = head >= kQHeads && head < kQHeads + kHeads;
          const int kv_head = is_key ? head - kQHeads : head / kGroup;
          double dot = 0;
          for (int d = 0; d < dim && head < kQHeads + kHeads; ++d) {
            const float mean = sequence.mean[static_cast<size_t>(kv_head * dim + d)];
            dot += static_cast<double>(row[static_cast<size_t>(d)]) * mean;
            row[static_cast<size_t>(d)] -= is_key ? mean : 0.f;
          }
          if (head < kQHeads) {
            dot_error = std::max(
                dot_error,
                std::fabs(dot - sequence.q_dot_mean[static_cast<size_t>(token * kQHeads + head)]));
          }
          std::vector<double> want(row.begin(), row.end());
          if (head < kQHeads + kHeads) {
            want = Rotated(row, size);
          }
          for (int d = 0; d < dim; ++d) {
            error = std::max(
                error, std::fabs(want[static_cast<size_t>(d)] - sequence.Row(token, head)[d]));
          }
        }
      }
      INFO(isa << " dim " << dim);
      CHECK(error < 5e-6);      // FP32 sums of at most 256 values below 8, normalised
      CHECK(dot_error < 2e-4);  // of 256 products of about 2
    }
  }
}

TEST_CASE("the rotation leaves q · k as it is and gives the same bits on every CPU") {
  for (int dim : {64, 80, 96, 128, 256}) {
    const CacheShape shape = Shape(KvCacheMode::kNone, dim, 16, 16);
    std::vector<float> first;
    for (const std::string& isa : AvailableCpuIsas()) {
      Sequence sequence(shape, 5);
      Sequence before = sequence;
      Layer layer(shape, {true, false, true, {}}, isa);
      layer.Step(sequence, 0, 16);
      first = first.empty() ? sequence.qkv : first;
      CHECK(SameBits(first, sequence.qkv));
      double error = 0;
      for (int i = 0; i < 16; ++i) {
        for (int j = 0; j < 16; ++j) {
          double want = 0;
          double got = sequence.q_dot_mean[static_cast<size_t>(i * kQHeads + 3)];
          double size = 0;
          for (int d = 0; d < dim; ++d) {
            const double product =
                static_cast<double>(before.Row(i, 3)[d]) * before.Row(j, kQHeads + 1)[d];
            want += product;
            size += std::fabs(product);
            got += static_cast<double>(sequence.Row(i, 3)[d]) * sequence.Row(j, kQHeads + 1)[d];
          }
          error = std::max(error, std::fabs(want - got) / size);
        }
      }
      CHECK(error < 1e-5);
    }
  }
}

TEST_CASE("a mean and a rotation change no output beyond rounding, sinks included") {
  CacheShape shape = Shape(KvCacheMode::kNone, 64);
  shape.dtype = DataType::kFloat32;
  Sequence plain(shape, 9);
  Sequence with_mean = plain;
  Layer raw(shape, {});
  const std::vector<float> want = RunSteps(raw, plain, shape.context, 50);
  for (int chunk : {50, 1}) {
    Sequence copy = with_mean;
    Layer layer(shape, {true, false, true, kBalanced});
    const std::vector<float> got = RunSteps(layer, copy, shape.context, chunk);
    double error = 0;
    for (size_t i = 0; i < want.size(); ++i) {
      error = std::max<double>(error, std::fabs(want[i] - got[i]));
    }
    CHECK(error < 5e-5);  // scores up to 30 in FP32, values below 4
  }
}

// --- Hot blocks -------------------------------------------------------------------------------

// What the query at the end sees is what the codec makes of the rows in place: cold ones encoded
// with the layer's format, hot ones rounded. Cold bytes equal those of direct encoding.
void CheckStored(Layer& layer, Sequence& sequence, bool search) {
  const KvLayerView& view = layer.cold().view();
  const int32_t context = layer.cold().shape().context;
  const int dim = view.head_dim;
  std::vector<float> flat[2];
  layer.Flatten(flat[0], flat[1], context);
  int64_t different = 0;
  for (int side = 0; side < 2; ++side) {
    for (int head = 0; head < kHeads; ++head) {
      for (int t = 0; t < context; ++t) {
        const KvSide kv_side = static_cast<KvSide>(side);
        const bool hot =
            layer.rule().enabled() && layer.rule().IsHot(t / view.block_seq_len, context - 1);
        const RowFormat format = {hot ? KvCacheMode::kNone : view.mode[side], dim, view.dtype,
                                  hot ? 1.f : layer.cold().Factor(kv_side, head), search};
        std::vector<uint8_t> payload(static_cast<size_t>(dim) * 4);
        std::vector<uint8_t> meta(64);
        std::vector<float> want(static_cast<size_t>(dim));
        EncodeByCodec(format, sequence.Row(t, kQHeads + side * kHeads + head), payload.data(),
                      meta.data());
        DecodeByCodec(format, payload.data(), meta.data(), want.data());
        const float* got = flat[side].data() + (static_cast<int64_t>(head) * context + t) * dim;
        different += std::memcmp(got, want.data(), sizeof(float) * want.size()) != 0;
        if (!hot) {
          different += std::memcmp(layer.cold().PayloadRow(kv_side, head, t), payload.data(),
                                   static_cast<size_t>(view.row_bytes[side])) != 0;
        }
      }
    }
  }
  CHECK(different == 0);
}

TEST_CASE("blocks that are moved hold the bytes of rows encoded when written") {
  testing::SanitizedSample sample(5);
  for (const std::string& isa : AvailableCpuIsas()) {
    for (KvCacheMode mode : kAllKvCacheModes) {
      for (int block : {16, 64, 128}) {
        for (bool search : {false, true}) {
          if (!sample.Next()) {
            continue;
          }
          INFO(isa << " " << std::string(ToString(mode)) << " block " << block);
          const CacheShape shape = Shape(mode, block == 16 ? 80 : 64, block);
          Sequence sequence(shape, 21);
          Layer layer(shape, {true, search, true, kBalanced}, isa);
          RunSteps(layer, sequence, shape.context, 70);
          CheckStored(layer, sequence, search);
          Sequence written = Sequence(shape, 21);
          Layer raw(shape, {true, search, true, {}}, isa);
          RunSteps(raw, written, shape.context, 70);
          CHECK(SameBits(sequence.qkv, written.qkv));
          CheckStored(raw, written, search);
        }
      }
    }
  }
}

TEST_CASE("chunks, moves and single tokens give the same outputs bit for bit") {
  for (KvCacheMode mode : kAllKvCacheModes) {
    for (int block : {16, 64, 128}) {
      const CacheShape shape = Shape(mode, 64, block, 420);
      std::vector<float> want;
      for (int chunk : {420, 1, 7, 64, 130}) {
        INFO(std::string(ToString(mode)) << " block " << block << " chunk " << chunk);
        Sequence sequence(shape, 33);
        Layer layer(shape, {true, true, true, kBalanced});
        const std::vector<float> got = RunSteps(layer, sequence, shape.context, chunk);
        want = want.empty() ? got : want;
        CHECK(SameBits(want, got));
        CHECK(layer.num_nonfinite() == 0);
      }
    }
  }
}

TEST_CASE("NaN and infinities are counted when written, not when moved") {
  const CacheShape shape = Shape(KvCacheMode::kFp4Nv, 64);
  Sequence sequence(shape, 2);
  sequence.Row(100, kQHeads)[5] = INFINITY;
  sequence.Row(110, kQHeads + kHeads)[7] = NAN;
  Layer layer(shape, {false, true, false, kBalanced});
  RunSteps(layer, sequence, shape.context, 64);
  CHECK(layer.num_nonfinite() == 2);
}

TEST_CASE("clipped values are counted when moved, not while they are kept in 16 bit") {
  const CacheShape shape = Shape(KvCacheMode::kFp4Nv, 64);
  Sequence sequence(shape, 2);
  sequence.Row(10, kQHeads)[5] = 1e5f;            // a sink
  sequence.Row(100, kQHeads)[5] = 1e5f;           // K
  sequence.Row(110, kQHeads + kHeads)[7] = 1e5f;  // V
  sequence.Row(299, kQHeads)[5] = 1e5f;           // in the newest block
  Layer layer(shape, {false, true, false, kBalanced});
  layer.Step(sequence, 0, 120);
  CHECK(layer.num_clipped() == 0);
  layer.Step(sequence, 120, shape.context);
  CHECK(layer.num_clipped() == 2);
}

// --- Checks -----------------------------------------------------------------------------------

// A decode step at `position`, its tables complete; `change` may spoil it.
template <class F>
void Attend(int position, F change) {
  const auto device = MakeCpuDevice(1);
  CacheShape shape = Shape(KvCacheMode::kInt4, 64);
  TestCache cold(shape);
  shape.k = shape.v = KvCacheMode::kNone;
  TestCache hot(shape);
  const int32_t cu_seqlens[2] = {0, 1};
  const int32_t context = position + 1;
  const int32_t at = position;
  std::vector<float> q(kQHeads * 64, 1.f);
  std::vector<float> out(q.size());
  AttentionParams p;
  p.q = q.data();
  p.q_stride = kQHeads * 64;
  p.out = out.data();
  p.q_heads = kQHeads;
  p.kv = cold.view();
  p.hot = hot.view();
  p.rule = MakeHotRule(kBalanced, 64);
  p.batch = {1, 1, 1, cu_seqlens, &context, &at, cold.table().data(), 5};
  p.batch.hot_tables = hot.table().data();
  change(p, cold.table(), hot.table());
  dispatchDecoding(*device, p);
}

TEST_CASE("attention refuses tables without a block that a query sees") {
  using Table = std::vector<int32_t>;
  // Position 270 is in block 4: hot are 0, 3 and 4, cold are 1 and 2.
  Attend(270, [](AttentionParams&, Table& cold, Table& hot) {
    cold[0] = cold[3] = cold[4] = -1;
    hot[1] = hot[2] = -1;
  });
  for (size_t block : {0, 3, 4}) {
    CHECK_THROWS_AS(Attend(270, [&](AttentionParams&, Table&, Table& hot) { hot[block] = -1; }),
                    InternalError);
  }
  for (size_t block : {1, 2}) {
    CHECK_THROWS_AS(Attend(270, [&](AttentionParams&, Table& cold, Table&) { cold[block] = -1; }),
                    InternalError);
  }
  CHECK_THROWS_AS(Attend(270, [](AttentionParams& p, Table&, Table&) { p.rule = {}; }),
                  InternalError);
  CHECK_THROWS_AS(Attend(270, [](AttentionParams& p, Table&, Table&) { p.hot = p.kv; }),
                  InternalError);
  // A window of 64 hides everything cold.
  Attend(270, [](AttentionParams& p, Table& cold, Table& hot) {
    p.window = 64;
    cold.assign(cold.size(), -1);
    hot[0] = -1;
  });
}

TEST_CASE("QuantiseBlocks refuses moves without a block") {
  const auto device = MakeCpuDevice(1);
  CacheShape shape = Shape(KvCacheMode::kInt4, 64);
  TestCache cold(shape);
  shape.k = shape.v = KvCacheMode::kNone;
  TestCache hot(shape);
  const BlockMove moves[] = {{1, 1}, {3, -1}};
  QuantiseBlocksParams p;
  p.kv = cold.view();
  p.hot = hot.view();
  p.moves = moves;
  p.num_moves = 1;
  invokeQuantiseBlocks(*device, p);
  p.num_moves = 2;
  CHECK_THROWS_AS(invokeQuantiseBlocks(*device, p), InternalError);
}

}  // namespace
}  // namespace turbomind
