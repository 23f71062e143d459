// Attention over latents on a GPU (backend/cuda/latent), run thread by thread on the CPU, against
// FP64 over the rows as they are stored.

#include <doctest/doctest.h>

#include <set>

#include "cuda/latent_fixture.h"
#include "turbomind/core/check.h"
#include "turbomind/ops/hadamard.h"

namespace turbomind::cuda::latent_step {
namespace {

// Relative to the output's L2 norm. FP16 operands have 11 bits; weights of a BF16 cache have 8.
constexpr double kMaxError = 1e-3;
constexpr double kMaxErrorBFloat = 6e-3;
constexpr size_t kSmallShared = size_t{99} << 10;  // SM 86, 89 and 120
constexpr size_t kLargeShared = size_t{227} << 10;

struct Run {
  std::vector<Chunk> chunks;  // decode sequences first, with one token each
  int num_decode = 0;
  int num_sms = 1;
  size_t shared_bytes = kLargeShared;
  bool deterministic = false;
};

// Return a factor with which random scores have a standard deviation of about 2, or more.
float ScaleOf(const Case& c) {
  return 2.f * c.softmax_factor / std::sqrt(static_cast<float>(c.rank + c.rotary));
}

std::vector<float> Queries(const Case& c, int width, unsigned seed) {
  std::mt19937 random(seed);
  return Normals(random, int64_t{c.context} * c.heads * width);
}

// The queries of a batch: those of its positions.
std::vector<float> Gather(const std::vector<float>& all, const BatchArrays& batch, int64_t width) {
  std::vector<float> out;
  for (const int32_t position : batch.positions) {
    out.insert(out.end(), all.begin() + position * width, all.begin() + (position + 1) * width);
  }
  return out;
}

StepGroup GroupOf(const Layer& layer, const BatchView& batch) {
  return {.batch = batch, .kv_heads = 1, .has_window16 = layer.rule.enabled(), .rule = layer.rule};
}

// Return [num_tokens, heads, rank].
std::vector<float> Attend(Layer& layer, const Run& run) {
  const Case& c = layer.c;
  Gpu gpu;
  gpu.context.gpu.num_sms = run.num_sms;
  gpu.context.gpu.shared_bytes_per_block = run.shared_bytes;
  gpu.context.deterministic = run.deterministic;
  const Places at = gpu.Upload(layer);
  const BatchArrays arrays(layer, run.chunks);
  const BatchView host = arrays.View(run.num_decode);
  DecodePlanner planner(gpu.context);
  if (!run.deterministic) {
    const StepGroup group = GroupOf(layer, host);
    planner.Upload({.groups = &group, .num_groups = 1, .q_heads = c.heads});
  }
  // A query has its rotary part behind the part without one, as the decoder's do.
  const std::vector<float> q = Gather(Queries(c, c.rank, 5), arrays, int64_t{c.heads} * c.rank);
  const std::vector<float> rotary =
      Gather(Queries(c, c.nope + c.rotary, 6), arrays, int64_t{c.heads} * (c.nope + c.rotary));
  LatentAttentionParams params = {.q = gpu.Upload(q),
                                  .q_stride = int64_t{c.heads} * c.rank,
                                  .q_rotary = gpu.Upload(rotary) + c.nope,
                                  .q_rotary_stride = int64_t{c.heads} * (c.nope + c.rotary),
                                  .q_rotary_head_stride = c.nope + c.rotary,
                                  .out = gpu.Upload(std::vector<float>(q.size(), NAN)),
                                  .q_heads = c.heads,
                                  .softmax_scale = ScaleOf(c),
                                  .rotate = c.rotate,
                                  .kv = QuantizedView(layer, at),
                                  .window16 = Window16View(layer, at),
                                  .rule = layer.rule,
                                  .batch = gpu.Upload(host)};
  CudaLatentAttention(gpu.context, planner, params, host);
  return gpu.Read(params.out, q.size());
}

double Dot(const float* a, const float* b, int n) {
  return std::inner_product(a, a + n, b, 0.0, std::plus<>(),
                            [](double x, double y) { return x * y; });
}

// FP64 attention of a query over the rows that its position reads.
std::vector<double> Wanted(const Case& c, int position, const float* q, const float* rotary,
                           const std::vector<float>& k, const std::vector<float>& v) {
  std::vector<double> out(static_cast<size_t>(c.rank));
  double sum = 0;
  for (int t = 0; t <= position; ++t) {
    const float* latent = v.data() + int64_t{t} * c.rank;
    const double weight =
        std::exp(ScaleOf(c) * (Dot(q, latent, c.rank) +
                               Dot(rotary, k.data() + int64_t{t} * c.rotary, c.rotary)));
    sum += weight;
    for (size_t d = 0; d < out.size(); ++d) {
      out[d] += weight * latent[d];
    }
  }
  for (double& x : out) {
    x /= sum;
  }
  return out;
}

// Return the error of a run's outputs relative to their L2 norm. Only some heads are compared.
double ErrorOf(Layer& layer, const Run& run, const std::vector<float>& got) {
  const Case& c = layer.c;
  const std::vector<float> q = Queries(c, c.rank, 5);
  const std::vector<float> rotary = Queries(c, c.nope + c.rotary, 6);
  std::vector<float> k(static_cast<size_t>(c.context * c.rotary));
  std::vector<float> v(static_cast<size_t>(c.context * c.rank));
  const BatchArrays arrays(layer, run.chunks);
  const int size = c.rank == 192 || c.rank == 320 ? 64 : c.rank == 272 ? 16 : c.rank;
  double error = 0;
  double norm = 0;
  for (size_t token = 0; token < arrays.positions.size(); ++token) {
    const int position = arrays.positions[token];
    const BatchArrays one(layer, {{position, position + 1}});
    Cpu().FlattenKV({.k = k.data(),
                     .v = v.data(),
                     .max_len = c.context,
                     .kv = QuantizedView(layer, OnHost(layer)),
                     .window16 = Window16View(layer, OnHost(layer)),
                     .rule = layer.rule,
                     .batch = one.View(1)});
    for (size_t i = 0; c.rotate && i < v.size(); i += static_cast<size_t>(size)) {
      RotateRun(v.data() + i, size);
    }
    for (const int head : std::set<int>{0, c.heads / 3, c.heads / 2, c.heads - 1}) {
      const int64_t row = int64_t{position} * c.heads + head;
      const std::vector<double> want =
          Wanted(c, position, q.data() + row * c.rank,
                 rotary.data() + row * (c.nope + c.rotary) + c.nope, k, v);
      const float* out = got.data() + (static_cast<int64_t>(token) * c.heads + head) * c.rank;
      for (size_t d = 0; d < want.size(); ++d) {
        error += (out[d] - want[d]) * (out[d] - want[d]);
        norm += want[d] * want[d];
      }
    }
  }
  return std::sqrt(error / norm);
}

void Check(const Case& c, const Run& run) {
  CAPTURE(Describe(c));
  CAPTURE(run.num_sms);
  CAPTURE(run.shared_bytes);
  Layer layer(c);
  layer.Fill();
  const std::vector<float> got = Attend(layer, run);
  CHECK(std::none_of(got.begin(), got.end(), [](float x) { return std::isnan(x); }));
  const bool bfloat =
      c.format == kNone && c.rotary_format == kNone && c.dtype == DataType::kBFloat16;
  // Rounded queries and keys change a score in proportion to its size.
  const double error = ErrorOf(layer, run, got) / c.softmax_factor;
  CHECK(error < (bfloat ? kMaxErrorBFloat : kMaxError));
}

TEST_CASE("decoding over latents equals FP64 in every format and number of heads") {
  const int heads[] = {16, 40, 64, 128};
  unsigned next = 0;
  for (const KvCacheMode format : kAllKvCacheModes) {
    for (const DataType dtype : {DataType::kBFloat16, DataType::kFloat16}) {
      const Case c = {.format = format,
                      .rotary_format = next % 3 == 2 ? kInt8 : kNone,
                      .dtype = dtype,
                      .heads = heads[next % 4],
                      .rank = next % 5 == 4 ? 192 : 512,
                      .rotary = next % 4 == 3 ? 32 : 64,
                      .global_scale = 0.75f};
      ++next;
      Check(c, {.chunks = {{299, 300}, {0, 1}, {130, 131}}, .num_decode = 3, .num_sms = 2});
    }
  }
}

TEST_CASE("every number of heads and rank") {
  for (const int heads : {1, 16, 20, 40, 64, 128}) {
    for (const int rank : {16, 256, 272, 512}) {
      const Case c = {.format = kFp4Mx, .heads = heads, .rank = rank, .context = 70};
      Check(c, {.chunks = {{69, 70}}, .num_decode = 1, .num_sms = 8});
      Check(c, {.chunks = {{64, 69}}, .num_sms = 8});
    }
  }
}

TEST_CASE("every context from 1 to 300 tokens" * doctest::test_suite("small")) {
  const Case c = {.format = kInt4, .heads = 5, .rank = 64, .rotary = 16, .block_seq_len = 16};
  Run run = {.chunks = {}, .num_sms = 4};
  for (int length = 1; length <= 300; length += length < 70 ? 1 : 23) {
    run.chunks.push_back({length - 1, length});
    ++run.num_decode;
  }
  Check(c, run);
}

TEST_CASE("the largest score of a row may come late") {
  for (const int heads : {16, 40}) {
    Check({.format = kFp4Nv, .heads = heads, .rank = 128, .softmax_factor = 6.f},
          {.chunks = {{299, 300}, {180, 181}}, .num_decode = 2, .num_sms = 1});
  }
}

TEST_CASE("prompts and drafts over latents equal FP64, whole and in parts") {
  for (const KvCacheMode format : {kNone, kFp4Nv, kInt8}) {
    for (const int sms : {1, 40}) {
      const Case c = {.format = format, .heads = 20, .rank = 256, .rotary = 64};
      Check(c, {.chunks = {{290, 294}}, .num_sms = sms});  // a draft
      Check(c, {.chunks = {{40, 41}, {0, 9}, {250, 262}}, .num_decode = 1, .num_sms = sms});
    }
  }
  Check({.format = kFp4Nv, .heads = 128}, {.chunks = {{270, 274}}, .num_sms = 40});
}

TEST_CASE("queries and sums are rotated as the latents are") {
  unsigned next = 0;
  for (const int rank : {16, 64, 192, 256, 272, 320, 512}) {
    for (const KvCacheMode format : {kNone, kFp4Mx}) {
      const Case c = {.format = format,
                      .heads = next++ % 2 == 0 ? 20 : 3,
                      .rank = rank,
                      .block_seq_len = 16,
                      .context = 100,
                      .window16 = {0, format == kNone ? -1 : 64},
                      .rotate = true};
      Check(c, {.chunks = {{99, 100}, {30, 31}}, .num_decode = 2, .num_sms = 8});
      Check(c, {.chunks = {{90, 91}, {3, 9}}, .num_decode = 1, .num_sms = 1});
      Check(c, {.chunks = {{99, 100}, {94, 99}}, .num_sms = 2, .deterministic = true});
    }
  }
  Check({.format = kFp4Nv, .heads = 20, .context = 600, .rotate = true},
        {.chunks = {{590, 594}}, .num_sms = 40});  // in parts
}

TEST_CASE("queries read 16-bit blocks and quantized ones as the rule says") {
  for (const KvCacheMode window : {kNone, kInt8}) {
    for (const KvCacheMode format : {kFp4Nv, kInt4}) {
      const Case c = {.format = format,
                      .rotary_format = kInt8,
                      .heads = 12,
                      .rank = 128,
                      .block_seq_len = 16,
                      .window16 = {64, 64},
                      .window_format = window,
                      .global_scale = 1.5f};
      Check(c, {.chunks = {{299, 300}, {50, 51}, {160, 161}}, .num_decode = 3, .num_sms = 3});
      for (const int sms : {1, 30}) {
        Check(c, {.chunks = {{120, 180}}, .num_sms = sms});
      }
    }
  }
}

TEST_CASE("offsets of blocks are added to latents") {
  unsigned next = 0;
  for (const KvCacheMode format : kAllKvCacheModes) {
    for (const int length : {16, 32, 64, 128}) {
      if (++next % 3 != 0 && !IsFp4(format)) {
        continue;
      }
      const int ranks[] = {128, 512, 192};
      const Case c = {.format = format,
                      .dtype = next % 3 == 0 ? DataType::kFloat16 : DataType::kBFloat16,
                      .heads = next % 2 == 0 ? 12 : 40,
                      .rank = ranks[next % 3],
                      .block_seq_len = length,
                      .context = 400,
                      .window16 = {length == 128 ? 128 : 64, 64},
                      .window_format = format != kNone && next % 3 == 0 ? kInt8 : kNone,
                      .rotate = next % 2 == 0,
                      .global_scale = next % 2 == 0 ? 1.5f : 1.f,
                      .offset = true,
                      .mean = 3.f};
      Check(c, {.chunks = {{399, 400}, {50, 51}, {290, 291}}, .num_decode = 3, .num_sms = 3});
      Check(c, {.chunks = {{215, 245}}, .num_sms = 30});
    }
  }
  // With little shared memory, a tile has one run of tokens.
  const Case c = {.block_seq_len = 16, .window16 = {64, 64}, .offset = true, .mean = 3.f};
  Check(c, {.chunks = {{299, 300}, {250, 254}}, .num_decode = 1, .shared_bytes = kSmallShared});
}

TEST_CASE("a GPU with little shared memory uses smaller tiles") {
  for (const KvCacheMode format : {kNone, kInt8, kFp4Mx}) {
    for (const DataType dtype : {DataType::kBFloat16, DataType::kFloat16}) {
      Check({.format = format, .dtype = dtype, .heads = 40, .context = 100},
            {.chunks = {{99, 100}, {40, 43}},
             .num_decode = 1,
             .num_sms = 2,
             .shared_bytes = kSmallShared});
    }
  }
}

TEST_CASE("a deterministic device gives a row the same bits in any batch and chunking") {
  for (const KvCacheMode format : {kNone, kFp4Nv}) {
    const Case c = {.format = format,
                    .heads = 20,
                    .rank = 128,
                    .rotary = 32,
                    .block_seq_len = 16,
                    .context = 560,
                    .window16 = {format == kNone ? 0 : 64, format == kNone ? -1 : 64}};
    Layer layer(c);
    layer.Fill();
    const auto row_size = static_cast<int64_t>(c.heads) * c.rank;
    const std::vector<float> whole =
        Attend(layer, {.chunks = {{530, 560}}, .num_sms = 40, .deterministic = true});
    const auto same = [&](const std::vector<float>& got, int64_t first, int position, int count) {
      return std::memcmp(got.data() + first * row_size, whole.data() + (position - 530) * row_size,
                         static_cast<size_t>(count * row_size) * sizeof(float)) == 0;
    };
    const std::vector<float> mixed = Attend(layer, {.chunks = {{559, 560}, {540, 541}, {531, 538}},
                                                    .num_decode = 2,
                                                    .num_sms = 3,
                                                    .deterministic = true});
    CHECK(same(mixed, 0, 559, 1));
    CHECK(same(mixed, 1, 540, 1));
    CHECK(same(mixed, 2, 531, 7));
  }
}

TEST_CASE("an unsupported rotary part is refused by name") {
  const Layer layer({.rank = 64, .rotary = 96, .context = 1});
  const KvLayerView view = layer.quantized.layout.LayerView(0, nullptr, nullptr);
  CHECK_THROWS_WITH_AS(RequireLatentKernels(view), doctest::Contains("rotary part of 96"),
                       InvalidArgument);
}

}  // namespace
}  // namespace turbomind::cuda::latent_step
