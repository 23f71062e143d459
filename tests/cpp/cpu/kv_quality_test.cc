#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cpu/kv_quality_fixture.h"
#include "sanitized_sample.h"
#include "turbomind/backend/cpu/cpu_device.h"
#include "turbomind/core/check.h"
#include "turbomind/ops/attention.h"
#include "turbomind/ops/flatten_kv.h"
#include "turbomind/ops/process_kv.h"
#include "turbomind/ops/quantize_blocks.h"

namespace turbomind::kv_quality {
namespace {

// Rotation and mean.

// Multiplies runs of `size` values with the normalized Hadamard matrix: (-1)^popcount(i & j) /
// sqrt(size).
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

TEST_CASE("Q and K are rotated after the mean is subtracted from K, and V is unchanged") {
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
      CHECK(error < 5e-6);      // FP32 sums of at most 256 values below 8, normalized
      CHECK(dot_error < 2e-4);  // sums of 256 products of about 2
    }
  }
}

TEST_CASE("the rotation preserves q · k and returns the same bits on every instruction set") {
  for (int dim : {64, 80, 96, 128, 256, 512}) {
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

TEST_CASE("a mean and a rotation change outputs, sinks included, only by rounding") {
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

// The 16-bit window.

// Checks that the query at the end sees the rows as the codecs store them. Rows in the quantized
// pool use the layer's format; rows in the 16-bit window are only rounded. The quantized bytes
// equal those of direct encoding.
void CheckStored(Layer& layer, Sequence& sequence, bool search) {
  const KvLayerView& view = layer.quantized().view();
  const int32_t context = layer.quantized().shape().context;
  const int dim = view.head_dim;
  std::vector<float> flat[2];
  layer.Flatten(flat[0], flat[1], context);
  int64_t different = 0;
  for (int side = 0; side < 2; ++side) {
    for (int head = 0; head < kHeads; ++head) {
      for (int t = 0; t < context; ++t) {
        const KvSide kv_side = static_cast<KvSide>(side);
        const bool window16 = layer.rule().enabled() &&
                              layer.rule().IsInWindow16(t / view.block_seq_len, context - 1);
        const RowFormat row_format = {
            window16 ? KvCacheMode::kNone : view.format[side], dim, view.dtype,
            window16 ? 1.f : layer.quantized().GlobalScale(kv_side, head), search};
        std::vector<uint8_t> payload(static_cast<size_t>(dim) * 4);
        std::vector<uint8_t> meta(64);
        std::vector<float> want(static_cast<size_t>(dim));
        EncodeByCodec(row_format, sequence.Row(t, kQHeads + side * kHeads + head), payload.data(),
                      meta.data());
        DecodeByCodec(row_format, payload.data(), meta.data(), want.data());
        const float* got = flat[side].data() + (static_cast<int64_t>(head) * context + t) * dim;
        different += std::memcmp(got, want.data(), sizeof(float) * want.size()) != 0;
        if (!window16) {
          different += std::memcmp(layer.quantized().PayloadRow(kv_side, head, t), payload.data(),
                                   static_cast<size_t>(view.row_bytes[side])) != 0;
        }
      }
    }
  }
  CHECK(different == 0);
}

TEST_CASE("blocks quantized later hold the same bytes as rows encoded when written") {
  testing::SanitizedSample sample(5);
  for (const std::string& isa : AvailableCpuIsas()) {
    for (KvCacheMode format : kAllKvCacheModes) {
      for (int block : {16, 64, 128}) {
        for (bool search : {false, true}) {
          if (!sample.Next()) {
            continue;
          }
          INFO(isa << " " << std::string(ToString(format)) << " block " << block);
          const CacheShape shape = Shape(format, block == 16 ? 80 : 64, block);
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

TEST_CASE("every chunk size returns the same outputs bit for bit") {
  for (KvCacheMode format : kAllKvCacheModes) {
    for (int block : {16, 64, 128}) {
      const CacheShape shape = Shape(format, 64, block, 420);
      std::vector<float> want;
      for (int chunk : {420, 1, 7, 64, 130}) {
        INFO(std::string(ToString(format)) << " block " << block << " chunk " << chunk);
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

TEST_CASE("NaN and infinities are counted when written, not when quantized later") {
  const CacheShape shape = Shape(KvCacheMode::kFp4Nv, 64);
  Sequence sequence(shape, 2);
  sequence.Row(100, kQHeads)[5] = INFINITY;
  sequence.Row(110, kQHeads + kHeads)[7] = NAN;
  Layer layer(shape, {false, true, false, kBalanced});
  RunSteps(layer, sequence, shape.context, 64);
  CHECK(layer.num_nonfinite() == 2);
}

TEST_CASE("clipped values are counted when quantized, not while they are in the 16-bit window") {
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

// Checks of the arguments.

// Runs a decode step at `position` with complete tables. `change` may break the arguments.
template <class F>
void Attend(int position, F change) {
  const auto device = MakeCpuDevice(1);
  CacheShape shape = Shape(KvCacheMode::kInt4, 64);
  TestCache quantized(shape);
  shape.k = shape.v = KvCacheMode::kNone;
  TestCache window16(shape);
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
  p.kv = quantized.view();
  p.window16 = window16.view();
  p.rule = MakePrecisionWindow(kBalanced, 64);
  p.batch = {1, 1, 1, cu_seqlens, &context, &at, quantized.table().data(), 5};
  p.batch.window16_tables = window16.table().data();
  change(p, quantized.table(), window16.table());
  dispatchDecoding(*device, p);
}

TEST_CASE("attention rejects tables that lack a block that a query sees") {
  using Table = std::vector<int32_t>;
  // Position 270 is in block 4. Blocks 0, 3 and 4 are in the 16-bit window; blocks 1 and 2 are
  // quantized.
  Attend(270, [](AttentionParams&, Table& quantized, Table& window16) {
    quantized[0] = quantized[3] = quantized[4] = -1;
    window16[1] = window16[2] = -1;
  });
  for (size_t block : {0, 3, 4}) {
    CHECK_THROWS_AS(
        Attend(270, [&](AttentionParams&, Table&, Table& window16) { window16[block] = -1; }),
        InternalError);
  }
  for (size_t block : {1, 2}) {
    CHECK_THROWS_AS(
        Attend(270, [&](AttentionParams&, Table& quantized, Table&) { quantized[block] = -1; }),
        InternalError);
  }
  CHECK_THROWS_AS(Attend(270, [](AttentionParams& p, Table&, Table&) { p.rule = {}; }),
                  InternalError);
  CHECK_THROWS_AS(Attend(270, [](AttentionParams& p, Table&, Table&) { p.window16 = p.kv; }),
                  InternalError);
  // A sliding window of 64 hides all quantized blocks.
  Attend(270, [](AttentionParams& p, Table& quantized, Table& window16) {
    p.window = 64;
    quantized.assign(quantized.size(), -1);
    window16[0] = -1;
  });
}

TEST_CASE("QuantizeBlocks rejects pending quantizations without a block") {
  const auto device = MakeCpuDevice(1);
  CacheShape shape = Shape(KvCacheMode::kInt4, 64);
  TestCache quantized(shape);
  shape.k = shape.v = KvCacheMode::kNone;
  TestCache window16(shape);
  const PendingQuantization blocks_to_quantize[] = {{1, 1}, {3, -1}};
  QuantizeBlocksParams p;
  p.kv = quantized.view();
  p.window16 = window16.view();
  p.blocks_to_quantize = blocks_to_quantize;
  p.num_to_quantize = 1;
  invokeQuantizeBlocks(*device, p);
  p.num_to_quantize = 2;
  CHECK_THROWS_AS(invokeQuantizeBlocks(*device, p), InternalError);
}

}  // namespace
}  // namespace turbomind::kv_quality
