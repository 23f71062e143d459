#include <algorithm>
#include <string>
#include <vector>

#include "turbomind/backend/cuda/kv_ops.h"
#include "turbomind/backend/cuda/launch.h"
#include "turbomind/backend/cuda/prefill_attention.h"
#include "turbomind/backend/cuda/prefill_convert.h"
#include "turbomind/backend/cuda/prefill_ops.h"
#include "turbomind/core/ceil_div.h"
#include "turbomind/core/check.h"

namespace turbomind::cuda {
namespace {

constexpr int64_t kAlignment = 256;

int64_t Aligned(int64_t num_bytes) { return CeilDiv(num_bytes, kAlignment) * kAlignment; }

// Sequences of one launch, and their rows in the two views.
struct Group {
  std::vector<PrefillSequence> sequences;  // first_tile is not set
  std::vector<FlattenSpan> spans[2];       // of the cold and of the hot view
  int64_t num_rows[2] = {0, 0};
  int heads_at_once = 0;

  int64_t ScratchBytes(int head_dim) const {
    int64_t bytes = 0;
    for (int view = 0; view < 2; ++view) {
      bytes += 2 * Aligned(num_rows[view] * heads_at_once * head_dim * 2);
      bytes += Aligned(static_cast<int64_t>(spans[view].size() * sizeof(FlattenSpan)));
    }
    return bytes;
  }
};

int64_t Length(const PositionSpan& span) { return std::max(span.end - span.begin, 0); }

void AddRange(const PositionSpan& span, int seq, int range, Group* group) {
  const int view = range == 0 ? 0 : 1;
  const int64_t length = Length(span);
  const int64_t row = group->num_rows[view];
  Check(row + length <= INT32_MAX, "the rows of a launch fit 31 bits");
  group->sequences.back().ranges[range] = {span.begin, static_cast<int32_t>(span.begin + length),
                                           static_cast<int32_t>(row)};
  if (length > 0) {
    group->spans[view].push_back({seq, span.begin, static_cast<int32_t>(row)});
    group->num_rows[view] += length;
  }
}

std::vector<Group> MakeGroups(const AttentionParams& p, const BatchView& host,
                              int64_t scratch_bytes) {
  const int64_t row_bytes = int64_t{2} * 2 * p.kv.head_dim;  // of a head: K and V
  std::vector<Group> groups;
  int64_t rows = 0;
  for (int seq = host.num_decode; seq < host.num_seqs; ++seq) {
    const int first_token = host.cu_seqlens[seq];
    const int num_tokens = host.cu_seqlens[seq + 1] - first_token;
    const int context = host.context_lens[seq];
    const SeenSpans spans = SpansOf(p.rule, p.window, context - num_tokens, context);
    const int64_t wanted = Length(spans.cold) + Length(spans.sinks) + Length(spans.recent);
    if (groups.empty() || groups.back().sequences.size() == kMaxPrefillSequences ||
        (rows + wanted) * row_bytes * p.kv.kv_heads > scratch_bytes) {
      groups.emplace_back();
      rows = 0;
    }
    rows += wanted;
    Group& group = groups.back();
    group.sequences.push_back({0, first_token, num_tokens, context - num_tokens, {}});
    AddRange(spans.cold, seq, 0, &group);
    AddRange(spans.sinks, seq, 1, &group);
    AddRange(spans.recent, seq, 2, &group);
    const int64_t fitting = scratch_bytes / (rows * row_bytes);
    group.heads_at_once = static_cast<int>(std::clamp<int64_t>(fitting, 1, p.kv.kv_heads));
  }
  return groups;
}

// The heads [first, first + count) of a layer as a layer.
KvLayerView HeadsOf(KvLayerView kv, int first, int count) {
  const int64_t payload = int64_t{first} * (kv.row_bytes[0] + kv.row_bytes[1]) * kv.block_seq_len;
  const int64_t params =
      int64_t{first} * (kv.param_bytes[0] + kv.param_bytes[1]) * kv.block_seq_len;
  kv.data += payload;
  kv.param_offset += params - payload;
  if (kv.scales != nullptr) {
    kv.scales += int64_t{first} * kv.block_seq_len * kv.ScaleStride();
  }
  for (const float*& g : kv.g) {
    g = g != nullptr ? g + first : nullptr;
  }
  kv.kv_heads = count;
  return kv;
}

bool IsBFloat(const KvLayerView& kv, int side) {
  return kv.mode[side] == KvCacheMode::kNone && kv.dtype == DataType::kBFloat16;
}

// One launch's part of the heads.
struct Pass {
  const Context& context;
  const AttentionParams& params;
  const Group& group;
  int first_head;
  int num_heads;

  bool bfloat() const { return IsBFloat(params.kv, 0) && IsBFloat(params.kv, 1); }
};

void ConvertToHalf(const Context& context, uint16_t* values, int64_t num_values) {
  const LaunchShape shape = {.grid_x = CeilDiv(num_values, kConvertThreads * kConvertValues),
                             .threads = kConvertThreads};
  Launch(ConvertKernel, shape, context.stream, ConvertParams{values, num_values});
}

// Flattens one view to `scratch`, behind its spans. Returns what lies behind it.
std::byte* Flatten(const Pass& pass, int which, std::byte* scratch, DenseView* view) {
  const std::vector<FlattenSpan>& spans = pass.group.spans[which];
  if (spans.empty()) {
    return scratch;
  }
  const AttentionParams& p = pass.params;
  const int64_t num_values = pass.group.num_rows[which] * pass.num_heads * p.kv.head_dim;
  const size_t span_bytes = spans.size() * sizeof(FlattenSpan);
  auto* const k = reinterpret_cast<uint16_t*>(scratch + Aligned(static_cast<int64_t>(span_bytes)));
  auto* const v = k + Aligned(num_values * 2) / 2;
  CopyBytes(scratch, spans.data(), span_bytes, pass.context.stream);
  FlattenHalfParams flatten;
  flatten.k = k;
  flatten.v = v;
  flatten.num_rows = pass.group.num_rows[which];
  flatten.spans = reinterpret_cast<const FlattenSpan*>(scratch);
  flatten.num_spans = static_cast<int>(spans.size());
  flatten.kv = HeadsOf(which == 0 ? p.kv : p.hot, pass.first_head, pass.num_heads);
  flatten.block_tables = which == 0 ? p.batch.block_tables : p.batch.hot_tables;
  flatten.block_table_stride = p.batch.block_table_stride;
  CudaFlattenToHalf(pass.context, flatten);
  for (int side = 0; side < 2; ++side) {
    if (IsBFloat(flatten.kv, side) && !pass.bfloat()) {
      ConvertToHalf(pass.context, side == 0 ? k : v, num_values);
    }
  }
  *view = {k, v, pass.group.num_rows[which]};
  return reinterpret_cast<std::byte*>(v) + Aligned(num_values * 2);
}

PrefillParams ParamsOf(const Pass& pass) {
  const AttentionParams& p = pass.params;
  PrefillParams out;
  out.q = p.q;
  out.q_stride = p.q_stride;
  out.out = p.out;
  out.sinks = p.sinks;
  out.q_dot_mean = p.q_dot_mean;
  out.key_factor = p.kv.g[0];
  out.value_factor = p.kv.g[1];
  out.q_heads = p.q_heads;
  out.group = p.q_heads / p.kv.kv_heads;
  out.first_head = pass.first_head;
  out.softmax_scale = p.softmax_scale;
  out.window = p.window;
  out.rule = p.rule;
  out.num_sequences = static_cast<int>(pass.group.sequences.size());
  std::copy(pass.group.sequences.begin(), pass.group.sequences.end(), out.sequences);
  return out;
}

// Sets the tiles of the sequences; returns their number.
int SetTiles(int tile_rows, PrefillParams* params) {
  int64_t tiles = 0;
  for (int i = 0; i < params->num_sequences; ++i) {
    PrefillSequence& sequence = params->sequences[i];
    sequence.first_tile = static_cast<int>(tiles);
    tiles += CeilDiv(int64_t{sequence.num_tokens} * params->group, tile_rows);
  }
  params->num_tiles = static_cast<int>(tiles);
  return params->num_tiles;
}

template <class C>
void LaunchTiles(const Pass& pass, PrefillParams params) {
  const LaunchShape shape = {.grid_x = SetTiles(C::kRows, &params),
                             .grid_y = pass.num_heads,
                             .threads = kPrefillThreads,
                             .shared_bytes = C::kSharedBytes};
  Launch(PrefillKernel<C>, shape, pass.context.stream, params);
}

// The larger tiles read less; the smaller ones spread a short chunk over more of the GPU.
template <DataType T, int D>
void LaunchHeadDim(const Pass& pass, PrefillParams params) {
  using Small = PrefillConfig<T, D, 1>;
  if constexpr (D <= 128) {
    using Large = PrefillConfig<T, D, 2>;
    const GpuProperties& gpu = pass.context.gpu;
    const int64_t blocks = int64_t{SetTiles(Large::kRows, &params)} * pass.num_heads;
    if (blocks >= kPrefillBlocks * gpu.num_sms &&
        size_t{Large::kSharedBytes} <= gpu.shared_bytes_per_block) {
      LaunchTiles<Large>(pass, params);
      return;
    }
  }
  LaunchTiles<Small>(pass, params);
}

template <DataType T>
void LaunchType(const Pass& pass, const PrefillParams& params) {
  switch (pass.params.kv.head_dim) {
    case 64:
      return LaunchHeadDim<T, 64>(pass, params);
    case 80:
      return LaunchHeadDim<T, 80>(pass, params);
    case 96:
      return LaunchHeadDim<T, 96>(pass, params);
    case 128:
      return LaunchHeadDim<T, 128>(pass, params);
    case 256:
      return LaunchHeadDim<T, 256>(pass, params);
    default:
      throw InternalError("prefill: no kernel for head_dim " +
                          std::to_string(pass.params.kv.head_dim));
  }
}

void RunPass(const Pass& pass, std::byte* scratch) {
  PrefillParams params = ParamsOf(pass);
  Flatten(pass, 1, Flatten(pass, 0, scratch, &params.cold), &params.hot);
  if (pass.bfloat()) {
    LaunchType<DataType::kBFloat16>(pass, params);
  } else {
    LaunchType<DataType::kFloat16>(pass, params);
  }
}

}  // namespace

void CudaPrefillAttention(const Context& context, const AttentionParams& params,
                          const BatchView& host, int64_t scratch_bytes) {
  const std::vector<Group> groups = MakeGroups(params, host, scratch_bytes);
  int64_t most = 0;
  for (const Group& group : groups) {
    most = std::max(most, group.ScratchBytes(params.kv.head_dim));
  }
  if (groups.empty()) {
    return;
  }
  const int kv_heads = params.kv.kv_heads;
  auto* const scratch = static_cast<std::byte*>(context.workspace->Get(static_cast<size_t>(most)));
  for (const Group& group : groups) {
    for (int head = 0; head < kv_heads; head += group.heads_at_once) {
      RunPass({context, params, group, head, std::min(group.heads_at_once, kv_heads - head)},
              scratch);
    }
  }
}

}  // namespace turbomind::cuda
