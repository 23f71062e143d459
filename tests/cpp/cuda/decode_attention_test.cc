// Runs the decode kernels of backend/cuda thread by thread on the CPU (cuda_shim/shim.h) and
// compares them with FP64 attention over the values that the codecs define.

#include "turbomind/backend/cuda/decode/decode_attention.cuh"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "turbomind/backend/cuda/decode/decode_combine.cuh"
#include "turbomind/backend/cuda/decode/decode_plan.h"
#include "turbomind/kv/codec.h"
#include "turbomind/kv/k_offset.h"
#include "turbomind/kv/layout.h"

namespace turbomind::cuda {
namespace {

using cuda_shim::Buffer;

// Relative to the output's L2 norm. FP16 operands have 11 bits; weights of a BF16 cache have 8.
constexpr double kMaxError = 1e-3;
constexpr double kMaxErrorBFloat = 6e-3;

struct Case {
  std::vector<DecodeRange> ranges;  // of the sequences; their caches end at range.end
  int kv_heads = 2;
  int group = 4;
  int block_seq_len = 64;
  bool sinks = false;
  bool mean = false;
  bool global_scales = false;
  bool k_offset = false;
  int num_slots = 4;
  int combine_warps = 1;  // 0: the block that ends last merges
  uint64_t seed = 1;
};

// One layer's pools, filled with encoded rows. Slots that no sequence owns are poisoned.
struct Pools {
  Pools(KvCacheMode k, KvCacheMode v, DataType dtype, int head_dim, const Case& c);

  void Fill(const Case& c, int sequence, int position, int head);
  void FillOffset(int block, int head);
  std::vector<float> Row(KvSide side, int sequence, int position, int head) const;
  int32_t Block(int sequence, int position) const {
    return table[static_cast<size_t>(sequence * blocks + position / view.block_seq_len)];
  }
  uint8_t* Payload(KvSide side, int sequence, int position, int head) const {
    return reinterpret_cast<uint8_t*>(view.Payload(side, Block(sequence, position), head)) +
           position % view.block_seq_len * view.row_bytes[static_cast<int>(side)];
  }
  uint8_t* Meta(KvSide side, int sequence, int position, int head) const;

  int blocks;  // per sequence
  KvLayerView view;
  std::vector<std::byte> data;
  std::vector<std::byte> scales;
  std::vector<int32_t> table;
  std::vector<float> global_scale[2];
  std::mt19937 random;
};

block::Config ConfigOf(KvCacheMode k, KvCacheMode v, DataType dtype, int head_dim, const Case& c) {
  block::Config config;
  config.layers = {{k, v}};
  config.kv_heads = c.kv_heads;
  config.head_dim = head_dim;
  config.block_seq_len = c.block_seq_len;
  config.dtype = dtype;
  config.k_offset = c.k_offset;
  return config;
}

Pools::Pools(KvCacheMode k, KvCacheMode v, DataType dtype, int head_dim, const Case& c)
    : random(static_cast<unsigned>(c.seed)) {
  int longest = 1;
  for (const DecodeRange& range : c.ranges) {
    longest = std::max(longest, range.end);
  }
  blocks = (longest - 1) / c.block_seq_len + 1;
  const block::Layout layout(ConfigOf(k, v, dtype, head_dim, c));
  const int total = blocks * static_cast<int>(c.ranges.size());
  data.assign(static_cast<size_t>(total * layout.block_bytes()), std::byte{0xff});
  scales.assign(static_cast<size_t>(total * layout.scale_block_bytes()), std::byte{0x7f});
  view = layout.LayerView(0, data.data(), scales.empty() ? nullptr : scales.data());
  for (int i = 0; i < total; ++i) {
    table.push_back(i);
  }
  std::shuffle(table.begin(), table.end(), random);
  for (int side = 0; side < 2 && c.global_scales; ++side) {
    if (!HasGlobalScale(view.format[side])) {
      continue;
    }
    for (int head = 0; head < c.kv_heads; ++head) {
      global_scale[side].push_back(0.25f * static_cast<float>(1 + head + side));
    }
    view.global_scale[side] = global_scale[side].data();
  }
  for (size_t i = 0; i < c.ranges.size(); ++i) {
    // Before a sliding window, the block in which it begins holds rows of the same sequence.
    const int first = c.ranges[i].begin / c.block_seq_len * c.block_seq_len;
    for (int position = first; position < c.ranges[i].end; ++position) {
      for (int head = 0; head < c.kv_heads; ++head) {
        Fill(c, static_cast<int>(i), position, head);
        if (view.HasKOffset() && position % c.block_seq_len == 0) {
          FillOffset(Block(static_cast<int>(i), position), head);
        }
      }
    }
  }
}

void Pools::FillOffset(int block, int head) {
  std::normal_distribution<float> normal(0.f, 2.f);
  std::vector<float> row(static_cast<size_t>(view.head_dim));
  std::generate(row.begin(), row.end(), [&] { return normal(random); });
  const KvRow to = view.KOffset(block, head);
  KOffsetCodec::EncodeRow(row.data(), view.head_dim, view.dtype, 1.f, to.payload, to.metadata);
}

uint8_t* Pools::Meta(KvSide side, int sequence, int position, int head) const {
  const int s = static_cast<int>(side);
  const int slot = position % view.block_seq_len;
  const int64_t block = Block(sequence, position);
  if (view.scale_bytes[s] > 0) {
    return reinterpret_cast<uint8_t*>(view.Scales(side, block, head)) + slot * view.ScaleStride();
  }
  if (view.param_bytes[s] > 0) {
    return reinterpret_cast<uint8_t*>(view.Params(side, block, head)) + slot * view.param_bytes[s];
  }
  return nullptr;
}

float GlobalScaleOf(const KvLayerView& view, int side, int head) {
  return view.global_scale[side] != nullptr ? view.global_scale[side][head] : 1.f;
}

void Pools::Fill(const Case& c, int sequence, int position, int head) {
  std::normal_distribution<float> normal(c.global_scales ? 0.3f : 0.f);
  std::vector<float> row(static_cast<size_t>(view.head_dim));
  for (int side = 0; side < 2; ++side) {
    for (float& x : row) {
      x = normal(random);
    }
    if (position < c.ranges[static_cast<size_t>(sequence)].begin) {
      row[random() % row.size()] = NAN;
    }
    DispatchFormat(view.format[side], [&]<KvCacheMode M>() {
      Codec<M>::EncodeRow(row.data(), view.head_dim, view.dtype, GlobalScaleOf(view, side, head),
                          Payload(static_cast<KvSide>(side), sequence, position, head),
                          Meta(static_cast<KvSide>(side), sequence, position, head));
    });
  }
}

std::vector<float> Pools::Row(KvSide side, int sequence, int position, int head) const {
  std::vector<float> row(static_cast<size_t>(view.head_dim));
  const int s = static_cast<int>(side);
  DispatchFormat(view.format[s], [&]<KvCacheMode M>() {
    Codec<M>::DecodeRow(Payload(side, sequence, position, head),
                        Meta(side, sequence, position, head), view.head_dim, view.dtype,
                        GlobalScaleOf(view, s, head), row.data());
  });
  if (side == KvSide::kK && view.HasKOffset()) {
    std::vector<float> offset(row.size());
    const KvRow at = view.KOffset(Block(sequence, position), head);
    KOffsetCodec::DecodeRow(at.payload, at.metadata, view.head_dim, view.dtype, 1.f, offset.data());
    std::transform(offset.begin(), offset.end(), row.begin(), row.begin(), std::plus<>());
  }
  return row;
}

// Inputs of attention besides the pools.
struct Inputs {
  int q_heads;
  std::vector<float> q;
  std::vector<float> sinks;
  std::vector<float> q_dot_mean;
  float softmax_scale;
};

Inputs MakeInputs(const Case& c, int head_dim) {
  std::mt19937 random(static_cast<unsigned>(c.seed) + 1000);
  std::normal_distribution<float> normal;
  const auto sampling = [&](size_t count) {
    std::vector<float> values(count);
    std::generate(values.begin(), values.end(), [&] { return normal(random); });
    return values;
  };
  Inputs in;
  in.q_heads = c.kv_heads * c.group;
  const size_t rows = c.ranges.size() * static_cast<size_t>(in.q_heads);
  in.q = sampling(rows * static_cast<size_t>(head_dim));
  in.sinks = sampling(c.sinks ? static_cast<size_t>(in.q_heads) : 0);
  in.q_dot_mean = sampling(c.mean ? rows : 0);
  in.softmax_scale = 2.f / std::sqrt(static_cast<float>(head_dim));
  return in;
}

std::vector<double> Reference(const Case& c, const Pools& pools, const Inputs& in) {
  const int D = pools.view.head_dim;
  std::vector<double> out(in.q.size());
  for (size_t i = 0; i < c.ranges.size(); ++i) {
    for (int head = 0; head < in.q_heads; ++head) {
      const size_t row = i * static_cast<size_t>(in.q_heads) + static_cast<size_t>(head);
      const float* q = in.q.data() + row * static_cast<size_t>(D);
      double m = -1e300;
      double l = 0;
      std::vector<double> o(static_cast<size_t>(D));
      const auto add = [&](double score, const std::vector<float>* v) {
        const double next = std::max(m, score);
        const double old = std::exp(m - next);
        const double weight = std::exp(score - next);
        l = l * old + weight;
        for (int d = 0; d < D; ++d) {
          o[static_cast<size_t>(d)] = o[static_cast<size_t>(d)] * old +
                                      (v != nullptr ? weight * (*v)[static_cast<size_t>(d)] : 0.);
        }
        m = next;
      };
      for (int position = c.ranges[i].begin; position < c.ranges[i].end; ++position) {
        const std::vector<float> k =
            pools.Row(KvSide::kK, static_cast<int>(i), position, head / c.group);
        const std::vector<float> v =
            pools.Row(KvSide::kV, static_cast<int>(i), position, head / c.group);
        double score = 0;
        for (int d = 0; d < D; ++d) {
          score += double{q[d]} * k[static_cast<size_t>(d)];
        }
        add(score * in.softmax_scale, &v);
      }
      if (c.sinks) {
        const double shift = c.mean ? double{in.softmax_scale} * in.q_dot_mean[row] : 0.;
        add(in.sinks[static_cast<size_t>(head)] - shift, nullptr);
      }
      for (int d = 0; d < D; ++d) {
        out[row * static_cast<size_t>(D) + static_cast<size_t>(d)] = o[static_cast<size_t>(d)] / l;
      }
    }
  }
  return out;
}

// Run the two kernels with threads in the order given by `seed`. Only the memory that they may
// access is registered.
template <class C>
std::vector<float> RunKernels(const Case& c, const Pools& pools, const Inputs& in, uint64_t seed) {
  const int head_blocks = (c.group + C::kHeads - 1) / C::kHeads;
  DecodePlan plan;
  PlanDecode(c.ranges, c.num_slots, &plan);
  const size_t partials = plan.items.size() * static_cast<size_t>(in.q_heads);
  std::vector<float> partial_o(partials * C::kHeadDim, NAN);
  std::vector<float> partial_ml(partials * 2, NAN);
  std::vector<float> out(in.q.size(), NAN);
  std::vector<std::unique_ptr<Buffer>> buffers;
  const auto share = [&](const auto& v, Buffer::Access access = Buffer::kRead) {
    if (!v.empty()) {
      buffers.push_back(std::make_unique<Buffer>(v.data(), v.size() * sizeof(v[0]), access));
    }
  };
  share(in.q);
  share(in.sinks);
  share(in.q_dot_mean);
  share(pools.data);
  share(pools.scales);
  share(pools.table);
  share(pools.global_scale[0]);
  share(pools.global_scale[1]);
  share(plan.items);
  share(plan.first_partial);
  share(partial_o, Buffer::kReadWrite);
  share(partial_ml, Buffer::kReadWrite);
  share(out, Buffer::kReadWrite);
  DecodeParams decode;
  decode.q = in.q.data();
  decode.q_stride = int64_t{in.q_heads} * C::kHeadDim;
  decode.kv = pools.view;
  decode.block_tables = pools.table.data();
  decode.block_table_stride = pools.blocks;
  decode.items = plan.items.data();
  decode.merge = {.partial_o = partial_o.data(),
                  .partial_ml = partial_ml.data(),
                  .first_partial = plan.first_partial.data(),
                  .out = out.data(),
                  .q_heads = in.q_heads,
                  .head_dim = C::kHeadDim,
                  .softmax_scale = in.softmax_scale,
                  .sinks = c.sinks ? in.sinks.data() : nullptr,
                  .q_dot_mean = c.mean ? in.q_dot_mean.data() : nullptr};
  std::vector<int32_t> arrivals;
  if (c.combine_warps == 0) {
    const int tiles = c.kv_heads * HeadTiles(c.group);
    arrivals.assign(c.ranges.size() * static_cast<size_t>(tiles), 0);
    share(arrivals, Buffer::kReadWrite);
    decode.arrivals = arrivals.data();
  }
  const auto items = static_cast<unsigned>(plan.items.size());
  cuda_shim::Launch({{static_cast<unsigned>(c.kv_heads * head_blocks), items},
                     {32 * C::kWarps},
                     C::kSharedBytes,
                     seed},
                    [&] { DecodeKernel<C>(decode); });
  if (c.combine_warps == 0) {
    CHECK(std::ranges::count(arrivals, 0) == std::ssize(arrivals));
    return out;
  }
  const CombineParams combine = {.merge = decode.merge,
                                 .num_rows = static_cast<int>(c.ranges.size()) * in.q_heads,
                                 .warps_per_row = c.combine_warps};
  constexpr int kVectors = MergeVectors(C::kHeadDim);
  const int blocks = (combine.num_rows * c.combine_warps - 1) / kCombineWarps + 1;
  cuda_shim::Launch(
      {{static_cast<unsigned>(blocks)}, {32 * kCombineWarps}, CombineSharedBytes(kVectors), seed},
      [&] { CombineKernel<kVectors>(combine); });
  return out;
}

double RelativeError(const std::vector<float>& got, const std::vector<double>& want) {
  double error = 0;
  double norm = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    error += (got[i] - want[i]) * (got[i] - want[i]);
    norm += want[i] * want[i];
  }
  return std::sqrt(error / norm);
}

// Check a case in several orders of the threads. All orders must give the same bits.
template <class C>
void CheckCase(const Case& c, uint64_t num_orders = 1) {
  const Pools pools(C::kKeyFormat, C::kValueFormat, C::kType, C::kHeadDim, c);
  const Inputs in = MakeInputs(c, C::kHeadDim);
  const std::vector<float> out = RunKernels<C>(c, pools, in, c.seed);
  const double error = RelativeError(out, Reference(c, pools, in));
  const std::string formats = std::string(ToString(C::kKeyFormat)) + " " +
                              ToString(C::kValueFormat) + " " + ToString(C::kType);
  CAPTURE(formats);
  CAPTURE(C::kHeadDim);
  CAPTURE(c.group);
  const bool bfloat = Fragments<C::kValueFormat, C::kType>::kBFloat;
  CHECK(error < (bfloat ? kMaxErrorBFloat : kMaxError));
  for (uint64_t order = 1; order < num_orders; ++order) {
    CHECK(RunKernels<C>(c, pools, in, c.seed + 100 * order) == out);
  }
}

std::vector<Case> Cases() {
  Case edges;  // lengths around the sizes of tiles, blocks and items
  edges.ranges = {{0, 1}, {0, 31}, {0, 33}, {0, 64}, {0, 129}};
  Case windows;
  windows.ranges = {{1, 129}, {100, 228}, {63, 64}, {37, 300}};
  windows.sinks = true;
  windows.group = 8;
  windows.kv_heads = 1;
  windows.combine_warps = 8;
  Case split;
  split.ranges = {{0, 1300}, {5, 700}};
  split.group = 3;
  split.kv_heads = 1;
  split.sinks = true;
  split.mean = true;
  split.global_scales = true;
  split.combine_warps = 2;
  Case offsets = windows;
  offsets.k_offset = true;
  offsets.global_scales = true;
  offsets.combine_warps = 0;
  Case merged = split;
  merged.group = 9;
  merged.num_slots = 8;
  merged.combine_warps = 0;
  return {edges, windows, split, offsets, merged};
}

template <KvCacheMode K, KvCacheMode V, DataType T, int D, int kTokens = 32>
void CheckAll(int block_seq_len = 64) {
  uint64_t seed = 1;
  for (Case c : Cases()) {
    c.seed = ++seed;
    c.block_seq_len = block_seq_len;
    CheckCase<DecodeConfig<K, V, T, D, kTokens, 3>>(c);
  }
}

using enum KvCacheMode;
constexpr DataType kHalf = DataType::kFloat16;
constexpr DataType kBFloat = DataType::kBFloat16;

TEST_CASE("decode matches the codecs' values at head_dim 128") {
  CheckAll<kNone, kNone, kHalf, 128>();
  CheckAll<kNone, kNone, kBFloat, 128>();
  CheckAll<kInt8, kInt8, kHalf, 128>();
  CheckAll<kInt4, kInt4, kBFloat, 128>();
  CheckAll<kFp8E4m3, kFp8E4m3, kHalf, 128>();
  CheckAll<kFp8E5m2, kFp8E5m2, kHalf, 128>();
  CheckAll<kFp4Mx, kFp4Mx, kBFloat, 128>();
  CheckAll<kFp4Nv, kFp4Nv, kBFloat, 128>();
}

TEST_CASE("decode matches the codecs' values at head_dim 64") {
  CheckAll<kNone, kNone, kHalf, 64>();
  CheckAll<kInt8, kInt8, kBFloat, 64>();
  CheckAll<kInt4, kInt4, kHalf, 64>();
  CheckAll<kFp8E4m3, kFp8E4m3, kHalf, 64>();
  CheckAll<kFp4Mx, kFp4Mx, kHalf, 64>();
  CheckAll<kFp4Nv, kFp4Nv, kHalf, 64>();
}

TEST_CASE("decode matches the codecs' values when a row does not divide among four lanes") {
  CheckAll<kFp4Nv, kFp4Nv, kHalf, 80>();
  CheckAll<kFp4Mx, kFp4Mx, kHalf, 96>();
  CheckAll<kInt4, kInt4, kHalf, 80>();
  CheckAll<kInt8, kInt8, kHalf, 80>();
  CheckAll<kFp8E4m3, kFp8E4m3, kHalf, 96>();
  CheckAll<kNone, kNone, kBFloat, 80>();
  CheckAll<kNone, kNone, kHalf, 96>();
}

TEST_CASE("decode matches the codecs' values at head_dim 256") {
  CheckAll<kFp4Nv, kFp4Nv, kHalf, 256>();
  CheckAll<kInt8, kInt8, kHalf, 256>();
  CheckAll<kNone, kNone, kBFloat, 256>();
}

TEST_CASE("decode matches the codecs' values when K is wider than V") {
  CheckAll<kInt8, kFp4Nv, kHalf, 64>();
  CheckAll<kFp8E4m3, kInt4, kHalf, 128>();
  CheckAll<kNone, kFp4Mx, kHalf, 64>();
}

TEST_CASE("decode handles blocks of 16, 32 and 128 positions with tiles of 16 and 64") {
  CheckAll<kFp4Nv, kFp4Nv, kHalf, 64, 16>(16);
  CheckAll<kFp4Mx, kFp4Mx, kHalf, 64, 16>(128);
  CheckAll<kInt8, kInt8, kHalf, 128, 16>(128);
  CheckAll<kFp4Mx, kFp4Mx, kHalf, 64, 64>(64);
  CheckAll<kFp4Nv, kFp4Nv, kHalf, 64, 64>(128);
  CheckAll<kNone, kNone, kHalf, 64, 16>(16);
  CheckAll<kFp4Nv, kFp4Nv, kHalf, 128>(32);
  CheckAll<kFp4Nv, kFp4Nv, kHalf, 64>(128);
}

TEST_CASE("decode handles 1 to 16 query heads in any order of threads") {
  constexpr uint64_t kOrders = 8;
  for (int group = 1; group <= 16; ++group) {
    Case c;
    c.ranges = {{0, 100}, {3, 40}};
    c.group = group;
    c.kv_heads = 1 + group % 2;
    c.seed = static_cast<uint64_t>(group);
    CheckCase<DecodeConfig<kFp4Nv, kFp4Nv, kHalf, 64, 32, 3>>(c, kOrders);
    CheckCase<DecodeConfig<kFp4Nv, kFp4Nv, kHalf, 64, 32, 3, 4, 2>>(c, kOrders);
  }
}

// A warp reads the offsets of kShiftRows tiles at once.
TEST_CASE("decode adds the K offsets of more tiles than a warp reads at once") {
  Case c;
  c.ranges = {{0, 1100}, {37, 600}};
  c.kv_heads = 1;
  c.num_slots = 1;
  c.k_offset = true;
  constexpr uint64_t kOrders = 3;
  CheckCase<DecodeConfig<kFp4Nv, kFp4Nv, kHalf, 64, 32, 3>>(c, kOrders);
  CheckCase<DecodeConfig<kInt8, kInt8, kBFloat, 64, 16, 3>>(c, kOrders);
  c.block_seq_len = 16;
  c.ranges = {{0, 1100}};
  CheckCase<DecodeConfig<kFp4Mx, kFp4Mx, kHalf, 64, 16, 3, 4, 2>>(c, kOrders);
}

TEST_CASE("decode handles two head tiles and other warp counts") {
  for (Case c : Cases()) {
    c.group = 13;
    c.kv_heads = 1;
    CheckCase<DecodeConfig<kFp4Mx, kFp4Mx, kHalf, 128, 32, 3, 4, 2>>(c);
    CheckCase<DecodeConfig<kInt4, kInt4, kBFloat, 128, 16, 3, 4, 2>>(c);
    c.group = 5;
    CheckCase<DecodeConfig<kNone, kNone, kHalf, 64, 16, 3, 2>>(c);
  }
}

}  // namespace
}  // namespace turbomind::cuda
