// Runs prefill attention of the CUDA backend thread by thread on the CPU (cuda_shim/shim.h).
// Compares it with FP64 attention over the values that the codecs define.

#include "turbomind/backend/cuda/prefill/prefill_ops.h"

#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "cpu/attention_fixture.h"
#include "cuda/gpu_array.h"
#include "turbomind/backend/cuda/prefill/prefill_shape.cuh"
#include "turbomind/core/ceil_div.h"

namespace turbomind::cuda {
namespace {

using enum KvCacheMode;

// Relative to the output's L2 norm. FP16 operands have 11 bits; weights of a BF16 cache have 8.
constexpr double kMaxHalfError = 1e-3;
constexpr double kMaxBFloatError = 6e-3;
constexpr int kManySms = 1 << 20;  // no chunk fills so many, which selects the smaller tiles

// The queries at positions [begin, end) of the cache's sequence. Each chunk is one sequence of the
// batch.
struct Chunk {
  int begin = 0;
  int end = 0;
};

struct Batch {
  std::vector<Chunk> chunks;  // decode sequences first, with one token each
  int num_decode = 0;
  int num_sms = 1;
  bool deterministic = false;
  int64_t scratch_bytes = kPrefillScratchBytes;
  // Factors for the scales of the quantized pool and for the softmax scale.
  float key_scale = 1.f;
  float value_scale = 1.f;
  float softmax_factor = 1.f;

  int num_tokens() const {
    int tokens = 0;
    for (const Chunk& chunk : chunks) {
      tokens += chunk.end - chunk.begin;
    }
    return tokens;
  }
};

// The arrays of a batch on the host.
struct HostBatch {
  HostBatch(const Case& c, Caches& caches, const Inputs& in, const Batch& b);

  int width;
  std::vector<int32_t> cu_seqlens = {0};
  std::vector<int32_t> context_lens;
  std::vector<int32_t> positions;
  std::vector<int32_t> tables;
  std::vector<int32_t> window16_tables;
  std::vector<float> q;  // q_heads of a wider row, as in qkv
  std::vector<float> q_dot_mean;
};

HostBatch::HostBatch(const Case& c, Caches& caches, const Inputs& in, const Batch& b)
    : width((c.group + 2) * c.shape.kv_heads * c.shape.head_dim) {
  const int q_heads = c.group * c.shape.kv_heads;
  const int row = q_heads * c.shape.head_dim;
  const CpuKvKernels kernels = CpuKvKernelsFor("scalar");
  ThreadPool pool(1);
  for (const Chunk& chunk : b.chunks) {
    for (int position = chunk.begin; position < chunk.end; ++position) {
      positions.push_back(position);
      const float* from = in.q.data() + int64_t{position} * row;
      q.insert(q.end(), from, from + row);
      q.resize(positions.size() * static_cast<size_t>(width), NAN);
      const float* means = in.q_dot_mean.data() + int64_t{position} * q_heads;
      q_dot_mean.insert(q_dot_mean.end(), means, means + q_heads);
    }
    cu_seqlens.push_back(static_cast<int32_t>(positions.size()));
    context_lens.push_back(chunk.end);
    const StepTables step =
        TablesOf({kernels, pool, c, caches, in}, chunk.begin, chunk.end - chunk.begin);
    tables.insert(tables.end(), step.quantized.begin(), step.quantized.end());
    window16_tables.insert(window16_tables.end(), step.window16.begin(), step.window16.end());
  }
}

// All arrays on the simulated GPU.
struct GpuRun {
  GpuRun(const Case& c, Caches& caches, const Inputs& in, const Batch& b);
  ~GpuRun() {
    memory.clear();
    DestroyStream(stream);
  }

  template <class T>
  T* Upload(const std::vector<T>& values) {
    const auto array = std::make_shared<GpuArray<T>>(stream, values);
    memory.push_back(array);
    return array->data();
  }
  KvLayerView Upload(TestCache& cache, const Batch& b);
  std::vector<float> Run(const Batch& b);

  HostBatch host;
  Stream stream = CreateStream();
  std::vector<std::shared_ptr<void>> memory;
  AttentionParams params;
  size_t num_out;
};

KvLayerView GpuRun::Upload(TestCache& cache, const Batch& b) {
  KvLayerView view = cache.view();
  view.data = Upload(cache.data()) + (view.data - cache.data().data());
  if (view.scales != nullptr) {
    view.scales = Upload(cache.scales()) + (view.scales - cache.scales().data());
  }
  for (int side = 0; side < 2; ++side) {
    if (view.global_scale[side] != nullptr) {
      std::vector<float> global_scale(view.global_scale[side],
                                      view.global_scale[side] + view.kv_heads);
      for (float& x : global_scale) {
        x *= side == 0 ? b.key_scale : b.value_scale;
      }
      view.global_scale[side] = Upload(global_scale);
    }
  }
  return view;
}

GpuRun::GpuRun(const Case& c, Caches& caches, const Inputs& in, const Batch& b)
    : host(c, caches, in, b) {
  const auto seqs = static_cast<int>(b.chunks.size());
  params.q = Upload(host.q);
  params.q_stride = host.width;
  params.q_heads = c.group * c.shape.kv_heads;
  num_out = host.positions.size() * static_cast<size_t>(params.q_heads * c.shape.head_dim);
  params.out = Upload(std::vector<float>(num_out, kSentinel));
  params.softmax_scale = b.softmax_factor / std::sqrt(static_cast<float>(c.shape.head_dim));
  params.window = c.window;
  params.sinks = c.sinks ? Upload(in.sinks) : nullptr;
  params.q_dot_mean = c.mean ? Upload(host.q_dot_mean) : nullptr;
  params.kv = Upload(caches.quantized, b);
  params.rule = caches.rule;
  BatchView& batch = params.batch;
  batch.num_seqs = seqs;
  batch.num_decode = b.num_decode;
  batch.num_tokens = host.cu_seqlens.back();
  batch.cu_seqlens = Upload(host.cu_seqlens);
  batch.context_lens = Upload(host.context_lens);
  batch.positions = Upload(host.positions);
  batch.block_tables = Upload(host.tables);
  batch.block_table_stride = static_cast<int64_t>(host.tables.size()) / seqs;
  if (caches.rule.enabled()) {
    params.window16 = Upload(caches.window16, b);
    batch.window16_tables = Upload(host.window16_tables);
  }
}

std::vector<float> GpuRun::Run(const Batch& b) {
  Workspace workspace(stream);
  Context context;
  context.stream = stream;
  context.gpu = PropertiesOf(0);
  context.gpu.num_sms = b.num_sms;
  context.deterministic = b.deterministic;
  context.workspace = &workspace;
  BatchView batch = params.batch;
  batch.cu_seqlens = host.cu_seqlens.data();
  batch.context_lens = host.context_lens.data();
  batch.positions = host.positions.data();
  batch.block_tables = host.tables.data();
  batch.window16_tables = host.window16_tables.data();
  CudaPrefillAttention(context, params, batch, {batch.num_decode, batch.num_seqs}, b.scratch_bytes);
  std::vector<float> out(num_out);
  CopyBytes(out.data(), params.out, num_out * sizeof(float), stream);
  Synchronize(stream);
  return out;
}

// Return the error of `out` for the tokens of `b`. Check that rows of decode sequences are
// untouched.
double RelativeError(const Case& c, Caches& caches, const Inputs& in, const Batch& b,
                     const std::vector<float>& out) {
  const int q_heads = c.group * c.shape.kv_heads;
  const float* got = out.data();
  double error = 0;
  double norm = 0;
  for (size_t i = 0; i < b.chunks.size(); ++i) {
    for (int position = b.chunks[i].begin; position < b.chunks[i].end; ++position) {
      for (int head = 0; head < q_heads; ++head, got += c.shape.head_dim) {
        if (static_cast<int>(i) < b.num_decode) {
          CHECK(std::all_of(got, got + c.shape.head_dim, [](float x) { return x == kSentinel; }));
          continue;
        }
        const std::vector<double> want = Reference(c, caches, in, position, head);
        for (size_t d = 0; d < want.size(); ++d) {
          error += (got[d] - want[d]) * (got[d] - want[d]);
          norm += want[d] * want[d];
        }
      }
    }
  }
  return std::sqrt(error / norm);
}

double Limit(const Case& c) {
  const bool bfloat =
      c.shape.k == kNone && c.shape.v == kNone && c.shape.dtype == DataType::kBFloat16;
  return bfloat ? kMaxBFloatError : kMaxHalfError;
}

std::vector<float> CheckBatch(const Case& c, const Batch& b) {
  const std::string name = Name(c, "cuda");
  CAPTURE(name);
  Caches caches(c);
  const Inputs in = MakeInputs(c);
  GpuRun run(c, caches, in, b);
  const std::vector<float> out = run.Run(b);
  CHECK(RelativeError(c, caches, in, b, out) < Limit(c));
  return out;
}

Case MakeCase(const FormatPair& pair, int head_dim, DataType dtype = DataType::kFloat16) {
  Case c;
  c.shape.k = pair.k;
  c.shape.v = pair.v;
  c.shape.head_dim = head_dim;
  c.shape.dtype = dtype;
  c.shape.context = 150;
  c.group = 2;
  return c;
}

TEST_CASE("prefill matches the codecs' values for every pair of formats") {
  constexpr int kDims[] = {64, 80, 96, 128, 256};
  int i = 0;
  for (const FormatPair& pair : ListedPairs()) {
    for (DataType dtype : {DataType::kFloat16, DataType::kBFloat16}) {
      Case c = MakeCase(pair, kDims[i % 5], dtype);
      c.shape.block_seq_len = 16 << (i % 4);
      Batch b;
      b.chunks = {{110, 150}};
      b.num_sms = i % 2 == 0 ? kManySms : 1;
      CheckBatch(c, b);
      ++i;
    }
  }
}

TEST_CASE("prefill matches the codecs' values at every head_dim from position 0 on") {
  for (int dim : {64, 80, 96, 128, 256}) {
    for (DataType dtype : {DataType::kFloat16, DataType::kBFloat16}) {
      Case c = MakeCase({kNone, kNone}, dim, dtype);
      c.shape.context = 130;
      c.shape.kv_heads = 1;
      Batch b;
      b.chunks = {{0, 130}};
      CheckBatch(c, b);
    }
  }
}

TEST_CASE("prefill handles sliding windows, sinks and means" * doctest::test_suite("small")) {
  for (int window : {0, 1, 30, 64, 100, 400}) {
    Case c = MakeCase({kFp4Nv, kFp4Nv}, 64);
    c.window = window;
    c.sinks = window != 30;
    c.mean = window != 100;
    c.shape.context = 290;
    c.group = 3;
    Batch b;
    b.chunks = {{200, 290}, {0, 70}};
    CheckBatch(c, b);
  }
}

TEST_CASE("prefill handles 1 to 16 query heads per KV head") {
  for (int group = 1; group <= 16; ++group) {
    Case c = MakeCase({kFp8E4m3, kFp8E4m3}, 64);
    c.group = group;
    c.shape.kv_heads = 1 + group % 2;
    c.sinks = group % 3 == 0;
    Batch b;
    b.chunks = {{101, 114}, {0, 5}};
    b.num_sms = group % 4 < 2 ? 1 : kManySms;
    CheckBatch(c, b);
  }
}

TEST_CASE("every query sees its own 16-bit window") {
  constexpr PrecisionWindowTokens kSizes[] = {{64, 64}, {64, 0},    {0, 64},
                                              {0, 0},   {128, 128}, {64, 256}};
  int i = 0;
  for (const PrecisionWindowTokens& window16 : kSizes) {
    for (int window : {0, 100, 40}) {
      Case c =
          MakeCase(i % 3 == 0   ? FormatPair{kFp4Nv, kFp4Nv}
                   : i % 3 == 1 ? FormatPair{kNone, kInt4}
                                : FormatPair{kFp8E4m3, kFp8E4m3},
                   i % 4 == 0 ? 128 : 64, i % 2 == 0 ? DataType::kBFloat16 : DataType::kFloat16);
      c.window16 = window16;
      c.window = window;
      c.sinks = i % 2 == 0;
      c.mean = i % 3 == 0;
      c.shape.kv_heads = 1 + i % 2;
      c.shape.context = 333;
      c.shape.block_seq_len = 16 << (i % 4);
      Batch b;
      b.chunks = {{250, 333}, {0, 37}};
      b.num_sms = i % 5 == 0 ? 1 : kManySms;
      CheckBatch(c, b);
      ++i;
    }
  }
}

// A rule that is off by one block must increase the error.
TEST_CASE("a wrong window rule is detected") {
  Case c = MakeCase({kInt4, kInt4}, 64);
  c.shape.context = 333;
  c.window16 = {64, 64};
  Batch b;
  b.chunks = {{290, 333}};
  Caches caches(c);
  const Inputs in = MakeInputs(c);
  GpuRun run(c, caches, in, b);
  const std::vector<float> out = run.Run(b);
  CHECK(RelativeError(c, caches, in, b, out) < kMaxHalfError);
  for (const PrecisionWindowTokens& other :
       {PrecisionWindowTokens{0, 64}, PrecisionWindowTokens{64, 0},
        PrecisionWindowTokens{64, 128}}) {
    Case wrong = c;
    wrong.window16 = other;
    Caches wrong_caches(wrong);
    CHECK(RelativeError(wrong, wrong_caches, in, b, out) > 5 * kMaxHalfError);
  }
}

TEST_CASE("prefill skips decode sequences and splits many sequences into several launches") {
  Case c = MakeCase({kInt8, kInt8}, 64);
  Batch b;
  b.chunks = {{149, 150}, {10, 11}};
  b.num_decode = 2;
  for (int i = 0; i < kMaxPrefillSequences + 3; ++i) {
    b.chunks.push_back({i, i + 1 + i % 3});
  }
  b.num_sms = kManySms;
  CheckBatch(c, b);
}

TEST_CASE("little scratch memory gives the same bits") {
  for (const FormatPair& pair : {FormatPair{kInt4, kInt4}, FormatPair{kFp8E4m3, kFp4Nv}}) {
    for (int recent : {-1, 64}) {
      Case c = MakeCase(pair, 64, DataType::kBFloat16);
      c.shape.kv_heads = 3;
      c.group = 1;
      c.sinks = true;
      c.shape.context = 200;
      c.window16.recent_tokens = recent;
      Batch b;
      b.chunks = {{170, 200}, {0, 20}, {60, 70}};
      const std::vector<float> want = CheckBatch(c, b);
      for (int64_t rows : {1, 500}) {
        b.scratch_bytes = rows * 2 * 2 * c.shape.head_dim;
        CHECK(SameBits(want, CheckBatch(c, b)));
      }
    }
  }
}

TEST_CASE("a sequence has the same bits for every chunking and tile size") {
  Case c = MakeCase({kFp4Mx, kFp4Mx}, 64);
  c.shape.context = 180;
  c.window = 90;
  c.window16 = {64, 64};
  c.shape.block_seq_len = 32;
  Batch whole;
  whole.chunks = {{0, 180}};
  const std::vector<float> want = CheckBatch(c, whole);
  whole.num_sms = kManySms;
  CHECK(SameBits(want, CheckBatch(c, whole)));
  for (int size : {1, 17, 64}) {
    Batch cut;
    cut.num_sms = size == 17 ? 1 : kManySms;
    for (int begin = size == 1 ? 170 : 0; begin < 180; begin += size) {
      cut.chunks.push_back({begin, std::min(begin + size, 180)});
    }
    const std::vector<float> got = CheckBatch(c, cut);
    CHECK(std::memcmp(want.data() + want.size() - got.size(), got.data(),
                      got.size() * sizeof(float)) == 0);
  }
}

TEST_CASE("few queries of a long context split its positions" * doctest::test_suite("small")) {
  int i = 0;
  for (const FormatPair& pair :
       {FormatPair{kFp4Nv, kFp4Nv}, FormatPair{kNone, kNone}, FormatPair{kInt8, kFp4Mx}}) {
    for (int recent : {-1, 64}) {
      Case c = MakeCase(pair, i == 3 ? 256 : i == 4 ? 80 : 64, DataType::kBFloat16);
      c.shape.context = 1100;
      c.group = 2;
      c.shape.kv_heads = 1 + i / 4;
      c.window = i % 2 == 0 ? 0 : 1060;
      c.sinks = c.mean = i > 1;
      c.window16 = {recent < 0 ? 0 : 64, recent};
      Batch b;
      b.chunks = {{20, 21}, {1093, 1100}, {30, 37}, {1080, 1081}};
      b.num_decode = 1;
      b.num_sms = kManySms;
      const std::vector<float> split = CheckBatch(c, b);
      b.deterministic = true;
      const std::vector<float> whole = CheckBatch(c, b);
      CHECK(!SameBits(split, whole));
      b.num_sms = 1;
      CHECK(SameBits(whole, CheckBatch(c, b)));
      if (c.shape.kv_heads > 1) {
        b.deterministic = false;
        b.num_sms = kManySms;
        b.scratch_bytes = 1;
        CheckBatch(c, b);  // each sequence and head separately
      }
      ++i;
    }
  }
}

// The softmax scale cancels the factor of keys; the factor of values appears in the reference.
TEST_CASE("prefill handles the largest and smallest scales") {
  constexpr float kLarge = 0x1p62f;
  for (float factor : {kLarge, 1 / kLarge}) {
    for (int recent : {-1, 64}) {
      Case c = MakeCase({kFp4Nv, kFp4Nv}, 64);
      c.shape.context = 260;
      c.window16.recent_tokens = recent;
      Batch b;
      b.chunks = {{220, 260}};
      b.value_scale = factor;
      if (recent < 0) {
        b.key_scale = factor;
        b.softmax_factor = 1 / factor;
      }
      Caches caches(c);
      for (int head = 0; head < c.shape.kv_heads; ++head) {
        for (int t = 0; t < c.shape.context; ++t) {
          float* row = caches.quantized.Decoded(KvSide::kV, head, t);
          std::for_each(row, row + c.shape.head_dim, [&](float& x) { x *= factor; });
        }
      }
      const Inputs in = MakeInputs(c);
      GpuRun run(c, caches, in, b);
      CHECK(RelativeError(c, caches, in, b, run.Run(b)) < kMaxHalfError);
    }
  }
}

TEST_CASE("BF16 values beyond FP16 become the largest FP16 value") {
  Case c = MakeCase({kNone, kInt4}, 64, DataType::kBFloat16);
  c.shape.context = 64;
  c.window16 = {};
  Caches caches(c);
  std::vector<float> row(64, 0.f);
  row[3] = -1e30f;
  for (int head = 0; head < c.shape.kv_heads; ++head) {
    caches.quantized.Write(KvSide::kK, head, 5, row.data());
    caches.quantized.Decoded(KvSide::kK, head, 5)[3] = -65504.f;
  }
  const Inputs in = MakeInputs(c);
  Batch b;
  b.chunks = {{20, 50}};
  GpuRun run(c, caches, in, b);
  CHECK(RelativeError(c, caches, in, b, run.Run(b)) < kMaxHalfError);
}

}  // namespace
}  // namespace turbomind::cuda
