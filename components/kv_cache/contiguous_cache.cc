#include "kv_cache/contiguous_cache.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>
#include <utility>

#include "turbomind/core/ceil_div.h"
#include "turbomind/core/check.h"
#include "turbomind/kv/block_seq_len.h"
#include "turbomind/kv/sliding_window.h"
#include "turbomind/ops/attention.h"
#include "turbomind/ops/copy_heads.h"
#include "turbomind/ops/flatten_kv.h"
#include "turbomind/ops/hadamard.h"
#include "turbomind/ops/process_kv.h"

namespace turbomind {
namespace {

constexpr int kRingBlockTokens = 64;
// A ring has room for the window and a piece that both begin and end inside a block.
constexpr int kRingExtraBlocks = 2;
// Tokens that are stored and attended at once. Every common group size divides the queries of one
// item of the CPU's attention, 96, so no item is partly empty.
constexpr int kPieceTokens = 96;
constexpr int kPagedPieceTokens = 1024;  // launches of a GPU cost much more than a call of a CPU
constexpr int kMaxLayers = 4096;
constexpr int kMaxHeads = 65536;
constexpr int kMaxHeadDim = 256;
constexpr int kMaxBatch = 65536;
constexpr int kMaxPosition = 1 << 30;
constexpr double kMaxBytes = 0x1p46;  // more than an address space can hold

void RequireRange(const char* name, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high) {
    throw InvalidArgument(name, "is " + std::to_string(value) + ". It must be from " +
                                    std::to_string(low) + " to " + std::to_string(high) + ".");
  }
}

void RequireValid(const ContiguousCacheConfig& config) {
  RequireRange("num_layers", static_cast<int64_t>(config.layers.size()), 1, kMaxLayers);
  RequireRange("num_heads", config.q_heads, 1, kMaxHeads);
  RequireRange("num_kv_heads", config.kv_heads, 1, kMaxHeads);
  RequireRange("head_dim", config.head_dim, 16, kMaxHeadDim);
  RequireRange("batch_size", config.batch_size, 1, kMaxBatch);
  RequireRange("window", config.window, 0, kMaxPosition);
  RequireRange("max_seq_len", config.max_seq_len, 1,
               config.window > 0 ? kMaxPosition : block::kMaxBlockSeqLen);
  if (config.q_heads % config.kv_heads != 0) {
    throw InvalidArgument("num_heads", "is " + std::to_string(config.q_heads) +
                                           ". It must be a multiple of num_kv_heads, " +
                                           std::to_string(config.kv_heads) + ".");
  }
  if (config.head_dim % 16 != 0) {
    throw InvalidArgument(
        "head_dim", "is " + std::to_string(config.head_dim) + ". It must be a multiple of 16.");
  }
}

KvCacheConfig PoolConfig(const ContiguousCacheConfig& config) {
  KvCacheConfig pool;
  pool.layers = config.layers;
  pool.windows.assign(config.layers.size(), config.window);
  pool.kv_heads = config.kv_heads;
  pool.head_dim = config.head_dim;
  pool.block_seq_len = kRingBlockTokens;
  pool.dtype = config.dtype;
  if (config.window == 0 && !config.paged) {
    const auto tokens = static_cast<unsigned>(std::max(config.max_seq_len, kRingBlockTokens));
    pool.block_seq_len = static_cast<int>(std::bit_ceil(tokens));
  }
  return pool;
}

// Returns the blocks of a sequence, or 0 if it is one block. Without a window, a ring is long
// enough for all positions.
int RingBlocks(const ContiguousCacheConfig& config) {
  if (config.window == 0) {
    return config.paged ? static_cast<int>(CeilDiv(config.max_seq_len, kRingBlockTokens)) : 0;
  }
  return static_cast<int>(CeilDiv(config.window, kRingBlockTokens)) + kRingExtraBlocks;
}

int64_t NumBlocks(const ContiguousCacheConfig& config) {
  return int64_t{config.batch_size} * std::max(RingBlocks(config), 1);
}

// Returns the configuration with the blocks that the device has kernels for.
ContiguousCacheConfig WithBlocksOf(const Device& device, ContiguousCacheConfig config) {
  config.paged = device.capability().is_cuda;
  return config;
}

// Returns the strides of a contiguous array [any, heads, tokens, head_dim], in bytes.
std::array<int64_t, 4> DenseStrides(int64_t heads, int64_t tokens, int64_t dim, int64_t bytes) {
  return {heads * tokens * dim * bytes, tokens * dim * bytes, dim * bytes, bytes};
}

}  // namespace

ContiguousCache::ContiguousCache(std::shared_ptr<Device> device, ContiguousCacheConfig config)
    : device_(std::move(device)),
      config_(WithBlocksOf(*device_, std::move(config))),
      ring_blocks_(RingBlocks(config_)) {
  if (static_cast<double>(PoolBytes(config_)) > kMaxBytes) {
    throw OutOfMemory("The cache would take more than 2^46 bytes. Reduce max_seq_len.");
  }
  const KvCacheConfig pool = PoolConfig(config_);
  for (const LayerGroup& group : MakeLayerGroups(pool)) {
    for (int layer = 0; layer < static_cast<int>(group.layers.size()); ++layer) {
      device_->RequireAttention(group.layout.LayerView(layer, nullptr, nullptr));
    }
  }
  device_->RunInOrderOf(nullptr, [&] {  // so that the current GPU stays the same
    cache_ = std::make_unique<KvCache>(*device_, pool, std::vector<int64_t>{NumBlocks(config_)});
    ReserveScratch();
  });
  new_tokens_.assign(config_.layers.size(), 0);
  ring_.assign(config_.layers.size() * static_cast<size_t>(ring_blocks_), -1);
}

ContiguousCache::~ContiguousCache() { device_->Release(qkv_, static_cast<size_t>(scratch_bytes_)); }

int64_t ContiguousCache::PoolBytes(const ContiguousCacheConfig& config) {
  RequireValid(config);
  const int64_t block_bytes = MakeLayerGroups(PoolConfig(config)).front().bytes_per_block();
  const double bytes = static_cast<double>(block_bytes) * static_cast<double>(NumBlocks(config));
  return bytes > 0x1p62 ? int64_t{1} << 62 : block_bytes * NumBlocks(config);
}

void ContiguousCache::ReserveScratch() {
  const auto batch = static_cast<size_t>(config_.batch_size);
  const size_t tokens = batch * static_cast<size_t>(PieceTokens());
  const int64_t token_values =
      (2 * int64_t{config_.q_heads} + 2 * int64_t{config_.kv_heads}) * config_.head_dim;
  const int64_t row_bytes = static_cast<int64_t>(tokens) * token_values * int64_t{sizeof(float)};
  scratch_bytes_ = row_bytes;
  if (config_.paged) {
    scratch_bytes_ += int64_t{sizeof(int64_t)} + config_.q_heads * int64_t{sizeof(float)};
  }
  auto* const scratch =
      static_cast<std::byte*>(device_->Reserve(static_cast<size_t>(scratch_bytes_)));
  qkv_ = reinterpret_cast<float*>(scratch);
  attended_ = qkv_ + static_cast<int64_t>(tokens) *
                         (config_.q_heads + 2 * int64_t{config_.kv_heads}) * config_.head_dim;
  if (config_.paged) {
    device_nonfinite_ = reinterpret_cast<int64_t*>(scratch + row_bytes);
    sinks_ = reinterpret_cast<float*>(device_nonfinite_ + 1);
  }
  // The visible blocks, and those before them up to the beginning of their split.
  table_stride_ = ring_blocks_ == 0 ? 1 : ring_blocks_ + kSplitTokens / kRingBlockTokens;
  cu_seqlens_.resize(batch + 1);
  context_lens_.resize(batch);
  positions_.resize(tokens);
  tables_.resize(batch * static_cast<size_t>(table_stride_));
}

int ContiguousCache::PieceTokens() const {
  const int of_batch = config_.paged ? kPagedPieceTokens : kPieceTokens;
  const int most = config_.window == 0 ? of_batch : kRingBlockTokens;
  return std::max(1, std::min(most, of_batch / config_.batch_size));
}

int64_t ContiguousCache::num_nonfinite() const {
  if (device_nonfinite_ == nullptr) {
    return num_nonfinite_;
  }
  int64_t count = 0;
  device_->RunInOrderOf(nullptr, [&] {
    count = *static_cast<const int64_t*>(device_->ReadBack(device_nonfinite_, sizeof(count)));
  });
  return count;
}

int64_t* ContiguousCache::Counter() {
  return device_nonfinite_ != nullptr ? device_nonfinite_ : &num_nonfinite_;
}

void ContiguousCache::RequireHostMemory(const char* call) const {
  if (config_.paged) {
    throw InvalidArgument(std::string(call) + " cannot be used with a cache on a GPU. Use attend.");
  }
}

double ContiguousCache::bytes_per_token() const {
  return static_cast<double>(cache_->bytes_per_block(0)) / cache_->block_seq_len();
}

int ContiguousCache::FirstDense(int end, int num_tokens) const {
  return FirstVisible(config_.window, end - std::max(num_tokens, 1));
}

bool ContiguousCache::Rotates(int layer) const {
  return config_.rotate_k && config_.layers[static_cast<size_t>(layer)].k != KvCacheMode::kNone;
}

void ContiguousCache::RequireLayer(int layer) const {
  RequireRange("layer_idx", layer, 0, static_cast<int64_t>(config_.layers.size()) - 1);
}

void ContiguousCache::RequireRoom(int layer, int num_tokens) const {
  RequireLayer(layer);
  RequireRange("num_tokens", num_tokens, 1, kMaxPosition);
  const int room = config_.max_seq_len - seq_len_;
  if (num_tokens > room) {
    throw InvalidArgument("k_new", "has " + std::to_string(num_tokens) + " tokens at position " +
                                       std::to_string(seq_len_) + ". At most " +
                                       std::to_string(room) + " fit until max_seq_len " +
                                       std::to_string(config_.max_seq_len) +
                                       ". Make a larger cache or call reset().");
  }
  RequireHeld(layer, {FirstVisible(config_.window, seq_len_), seq_len_}, "k_new");
}

// Throws InvalidArgument if newer tokens have replaced some of the positions in the ring.
void ContiguousCache::RequireHeld(int layer, Span positions, const char* call) const {
  if (ring_blocks_ == 0) {
    return;
  }
  const int* ring = ring_.data() + static_cast<int64_t>(layer) * ring_blocks_;
  for (int block = positions.begin / kRingBlockTokens; block * kRingBlockTokens < positions.end;
       ++block) {
    if (ring[block % ring_blocks_] != block) {
      throw InvalidArgument(std::string(call) + " cannot be used at position " +
                            std::to_string(positions.end) + ". Layer " + std::to_string(layer) +
                            " has dropped position " +
                            std::to_string(std::max(positions.begin, block * kRingBlockTokens)) +
                            ", because newer tokens filled its window. Call reset().");
    }
  }
}

// Returns the batch of the queries at positions [queries.begin, queries.end). Positions count from
// first_position, so that the tables of a ring stay short. Attention cuts positions into splits, so
// first_position must be a multiple of kSplitTokens for it. Blocks before first_needed are -1.
BatchView ContiguousCache::Plan(Span queries, int first_position, int first_needed) {
  const int batch = config_.batch_size;
  const int count = queries.end - queries.begin;
  for (int seq = 0; seq < batch; ++seq) {
    cu_seqlens_[static_cast<size_t>(seq)] = seq * count;
    context_lens_[static_cast<size_t>(seq)] = queries.end - first_position;
    for (int i = 0; i < count; ++i) {
      positions_[static_cast<size_t>(seq * count + i)] = queries.begin - first_position + i;
    }
    int32_t* table = tables_.data() + seq * table_stride_;
    if (ring_blocks_ == 0) {
      table[0] = seq;
      continue;
    }
    const int first_block = first_position / kRingBlockTokens;
    for (int64_t i = 0; i < table_stride_; ++i) {
      const int block = first_block + static_cast<int>(i);
      const bool is_used =
          block >= first_needed / kRingBlockTokens && block <= (queries.end - 1) / kRingBlockTokens;
      table[i] = is_used ? seq * ring_blocks_ + block % ring_blocks_ : -1;
    }
  }
  cu_seqlens_[static_cast<size_t>(batch)] = batch * count;
  return {.num_seqs = batch,
          .num_decode = count == 1 ? batch : 0,
          .num_tokens = batch * count,
          .cu_seqlens = cu_seqlens_.data(),
          .context_lens = context_lens_.data(),
          .positions = positions_.data(),
          .block_tables = tables_.data(),
          .block_table_stride = table_stride_};
}

// Copies the heads of a piece into qkv_, from head `first_head` of each token on.
void ContiguousCache::Gather(const HeadRows& rows, const Piece& piece, int first_head,
                             int num_heads) {
  std::byte* const first = const_cast<std::byte*>(rows.data) + piece.first * rows.strides[2];
  device_->CopyHeads({.array = first,
                      .dtype = rows.dtype,
                      .strides = rows.strides,
                      .num_seqs = config_.batch_size,
                      .num_heads = num_heads,
                      .num_tokens = piece.count,
                      .head_dim = config_.head_dim,
                      .rows = qkv_,
                      .row_heads = row_heads_,
                      .first_head = first_head});
}

// Copies the results of a piece to their places in queries.out.
void ContiguousCache::Scatter(const Queries& queries, const Piece& piece, int num_tokens) {
  const std::array<int64_t, 4> strides =
      DenseStrides(config_.q_heads, num_tokens, config_.head_dim, SizeOf(queries.out_dtype));
  device_->CopyHeads({.array = queries.out + piece.first * strides[2],
                      .dtype = queries.out_dtype,
                      .strides = strides,
                      .num_seqs = config_.batch_size,
                      .num_heads = config_.q_heads,
                      .num_tokens = piece.count,
                      .head_dim = config_.head_dim,
                      .rows = attended_,
                      .row_heads = config_.q_heads,
                      .to_rows = false});
}

// Returns the batch of a piece, and notes its blocks.
BatchView ContiguousCache::PlanPiece(int layer, const Piece& piece) {
  const int begin = seq_len_ + piece.first;
  const int end = begin + piece.count;
  const int visible = FirstVisible(config_.window, begin);
  const BatchView batch = Plan({begin, end}, visible / kSplitTokens * kSplitTokens, visible);
  if (ring_blocks_ > 0) {
    int* ring = ring_.data() + static_cast<int64_t>(layer) * ring_blocks_;
    for (int block = begin / kRingBlockTokens; block * kRingBlockTokens < end; ++block) {
      ring[block % ring_blocks_] = block;
    }
  }
  return batch;
}

// Stores the K and V of a batch and rotates its Q, all in qkv_.
void ContiguousCache::Store(int layer, const BatchView& batch) {
  invokeProcessKV_v2(*device_, {.qkv = qkv_,
                                .q_heads = row_heads_ - 2 * config_.kv_heads,
                                .rotate = Rotates(layer),
                                .search_scales = config_.search_scales,
                                .kv = View(layer),
                                .batch = batch,
                                .num_nonfinite = Counter()});
}

// Runs the ops of a layer as a step of their own.
void ContiguousCache::RunBatch(const BatchView& batch, FunctionRef<void()> ops) {
  const StepGroup group = {.batch = batch, .window = config_.window, .kv_heads = config_.kv_heads};
  device_->RunStep({.tokens = batch.positions,  // no op reads token ids
                    .groups = &group,
                    .num_groups = 1,
                    .q_heads = config_.q_heads,
                    .op_by_op = true},  // the next layer has the same shape, but other memory
                   ops);
}

void ContiguousCache::Append(int layer, const NewRows& rows, const DenseRows& dense) {
  RequireHostMemory("update");
  RequireRoom(layer, rows.num_tokens);
  new_tokens_[static_cast<size_t>(layer)] = 0;  // in case an op throws
  const int kv_heads = config_.kv_heads;
  row_heads_ = 3 * kv_heads;  // WriteKv has at least one query head per KV head
  const int end = seq_len_ + rows.num_tokens;
  const int first = FirstDense(end, rows.num_tokens);
  const DenseTarget target = {dense, first, end - first};
  // A piece can replace rows in a ring that `dense` receives, so they are decoded before it.
  if (dense.k != nullptr && ring_blocks_ > 0) {
    Decode(layer, {first, seq_len_}, target);
  }
  const int piece_tokens = PieceTokens();
  for (int done = 0; done < rows.num_tokens; done += piece_tokens) {
    const Piece piece = {done, std::min(piece_tokens, rows.num_tokens - done)};
    const int64_t tokens = int64_t{config_.batch_size} * piece.count;
    std::fill_n(qkv_, tokens * row_heads_ * config_.head_dim, 0.f);
    Gather(rows.k, piece, kv_heads, kv_heads);
    Gather(rows.v, piece, 2 * kv_heads, kv_heads);
    Store(layer, PlanPiece(layer, piece));
    if (dense.k != nullptr && ring_blocks_ > 0) {
      Decode(layer, {seq_len_ + done, seq_len_ + done + piece.count}, target);
    }
  }
  if (dense.k != nullptr && ring_blocks_ == 0) {
    Decode(layer, {0, end}, target);
  }
  new_tokens_[static_cast<size_t>(layer)] = rows.num_tokens;
}

void ContiguousCache::Attend(int layer, const NewRows& rows, const Queries& queries) {
  RequireRoom(layer, rows.num_tokens);
  device_->RunInOrderOf(queries.stream, [&] { AttendInOrder(layer, rows, queries); });
}

void ContiguousCache::AttendInOrder(int layer, const NewRows& rows, const Queries& queries) {
  new_tokens_[static_cast<size_t>(layer)] = 0;  // in case an op throws
  const int q_heads = config_.q_heads;
  const int kv_heads = config_.kv_heads;
  row_heads_ = q_heads + 2 * kv_heads;
  const int piece_tokens = PieceTokens();
  CopySinks(queries);
  for (int done = 0; done < rows.num_tokens; done += piece_tokens) {
    const Piece piece = {done, std::min(piece_tokens, rows.num_tokens - done)};
    Gather(queries.q, piece, 0, q_heads);
    Gather(rows.k, piece, q_heads, kv_heads);
    Gather(rows.v, piece, q_heads + kv_heads, kv_heads);
    const BatchView batch = PlanPiece(layer, piece);
    RunBatch(batch, [&] {
      Store(layer, batch);
      const AttentionParams params = ParamsOf(layer, batch, queries);
      if (batch.num_decode > 0) {
        dispatchDecoding(*device_, params);
      } else {
        invokePrefillAttention(*device_, params);
      }
    });
    Scatter(queries, piece, rows.num_tokens);
  }
  new_tokens_[static_cast<size_t>(layer)] = rows.num_tokens;
}

// Copies the sinks to where attention reads them, if that is not where the caller has them.
void ContiguousCache::CopySinks(const Queries& queries) {
  if (sinks_ == nullptr || queries.sinks == nullptr) {
    return;
  }
  const auto* const from = reinterpret_cast<const std::byte*>(queries.sinks);
  device_->CopyHeads({.array = const_cast<std::byte*>(from),
                      .strides = DenseStrides(config_.q_heads, 1, 1, sizeof(float)),
                      .num_seqs = 1,
                      .num_heads = config_.q_heads,
                      .num_tokens = 1,
                      .head_dim = 1,
                      .rows = sinks_,
                      .row_heads = config_.q_heads});
}

AttentionParams ContiguousCache::ParamsOf(int layer, const BatchView& batch,
                                          const Queries& queries) const {
  return {.q = qkv_,
          .q_stride = int64_t{row_heads_} * config_.head_dim,
          .out = attended_,
          .q_heads = config_.q_heads,
          .softmax_scale = queries.softmax_scale,
          .exact = config_.exact,
          .window = config_.window,
          .sinks = queries.sinks != nullptr && sinks_ != nullptr ? sinks_ : queries.sinks,
          .kv = View(layer),
          .batch = batch};
}

AttentionParams ContiguousCache::NextStep(int layer) {
  const int visible = FirstVisible(config_.window, seq_len_);
  const int first = visible / kSplitTokens * kSplitTokens;
  return ParamsOf(layer, Plan({seq_len_, seq_len_ + 1}, first, visible), {});
}

void ContiguousCache::Read(int layer, const DenseRows& dense) {
  RequireHostMemory("keys and values");
  RequireLayer(layer);
  const int first = FirstDense(seq_len_, 0);
  RequireHeld(layer, {first, seq_len_}, "keys or values");
  Decode(layer, {first, seq_len_}, {dense, first, seq_len_ - first});
}

// Decodes positions to their places in `target`.
void ContiguousCache::Decode(int layer, Span positions, const DenseTarget& target) {
  if (positions.begin >= positions.end) {
    return;
  }
  const int base = ring_blocks_ == 0 ? 0 : positions.begin / kRingBlockTokens * kRingBlockTokens;
  const int tokens = positions.end - base;
  const int64_t num_heads = int64_t{config_.batch_size} * config_.kv_heads;
  const int64_t dim = config_.head_dim;
  const bool is_direct = target.first == base && target.num_tokens == tokens;
  const int64_t side_values = num_heads * tokens * dim;
  std::vector<float> rows(static_cast<size_t>(is_direct ? 0 : 2 * side_values));
  float* k = is_direct ? target.rows.k : rows.data();
  float* v = is_direct ? target.rows.v : rows.data() + side_values;
  invokeFlattenKV_v2(*device_,
                     {.k = k,
                      .v = v,
                      .max_len = tokens,
                      .kv = View(layer),
                      .batch = Plan({positions.end - 1, positions.end}, base, positions.begin)});
  if (Rotates(layer)) {
    RotateBack(k, num_heads * tokens);
  }
  if (is_direct) {
    return;
  }
  const int64_t count = int64_t{positions.end - positions.begin} * dim;
  for (int64_t head = 0; head < num_heads; ++head) {
    const int64_t from = (head * tokens + positions.begin - base) * dim;
    const int64_t to = (head * target.num_tokens + positions.begin - target.first) * dim;
    std::copy_n(k + from, count, target.rows.k + to);
    std::copy_n(v + from, count, target.rows.v + to);
  }
}

void ContiguousCache::RotateBack(float* k, int64_t num_rows) {
  const int dim = config_.head_dim;
  const int size = RotationSize(dim);
  ForEachRowOnHost(*device_, num_rows, dim, [&](int64_t row) {
    for (int d = 0; d < dim; d += size) {
      RotateRun(k + row * dim + d, size);
    }
  });
}

void ContiguousCache::Advance(int num_tokens) {
  RequireRange("num_tokens", num_tokens, 0, kMaxPosition);
  for (size_t layer = 0; layer < new_tokens_.size(); ++layer) {
    if (new_tokens_[layer] < num_tokens) {
      throw InvalidArgument(
          "num_tokens", "is " + std::to_string(num_tokens) + ". Layer " + std::to_string(layer) +
                            " has " + std::to_string(new_tokens_[layer]) +
                            " new tokens. Call attend or update for every layer first.");
    }
  }
  const int end = seq_len_ + num_tokens;
  for (size_t layer = 0; layer < new_tokens_.size(); ++layer) {
    RequireHeld(static_cast<int>(layer), {FirstDense(end, 0), end}, "advance");
  }
  seq_len_ = end;
  std::fill(new_tokens_.begin(), new_tokens_.end(), 0);
}

void ContiguousCache::Truncate(int seq_len) {
  RequireRange("seq_len", seq_len, 0, seq_len_);
  for (int layer = 0; layer < static_cast<int>(new_tokens_.size()); ++layer) {
    RequireHeld(layer, {FirstDense(seq_len, 0), seq_len}, "truncate");
  }
  seq_len_ = seq_len;
  std::fill(new_tokens_.begin(), new_tokens_.end(), 0);
}

void ContiguousCache::Reset() {
  seq_len_ = 0;
  std::fill(new_tokens_.begin(), new_tokens_.end(), 0);
  std::fill(ring_.begin(), ring_.end(), -1);
}

}  // namespace turbomind
