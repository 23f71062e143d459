#pragma once

// ⑥⑦ Arguments of the ops that touch the cache and of the dense ops: one struct each, a shape
// beside each pointer. Plain data, read by every backend. Everything is row-major; activations are
// FP32.

#include <cstdint>
#include <memory>

#include "turbomind/core/host_device.h"
#include "turbomind/kv/layout.h"
#include "turbomind/kv/precision_window.h"

namespace turbomind {

class RopeTable;

// One step's flat arrays. Sequences with one new token (decode) come first.
struct BatchView {
  int num_seqs = 0;
  int num_decode = 0;                     // the first num_decode sequences have exactly one token
  int num_tokens = 0;                     // cu_seqlens[num_seqs]
  const int32_t* cu_seqlens = nullptr;    // [num_seqs + 1] new tokens of each sequence
  const int32_t* context_lens = nullptr;  // [num_seqs] tokens in the cache after this step's write
  const int32_t* positions = nullptr;     // [num_tokens] context_len - new tokens + i
  // [num_seqs, block_table_stride] of the layer's group, indexed by position / block_seq_len; -1
  // where a sliding group has freed the block, or where it is in the 16-bit pool alone.
  const int32_t* block_tables = nullptr;
  int64_t block_table_stride = 0;
  // Same shape, ids in the group's 16-bit pool; -1 where the block has no 16-bit copy. Null where
  // there is no 16-bit window.
  const int32_t* window16_tables = nullptr;
  const PendingQuantization* blocks_to_quantize =
      nullptr;  // [num_to_quantize] to be quantized after the write of this step
  int num_to_quantize = 0;
};

// What the layers of a group share in a step.
struct StepGroup {
  BatchView batch;
  int window = 0;  // 0: full attention
  int kv_heads = 0;
  bool has_window16 = false;
  PrecisionWindow rule = {};
};

struct StepParams {
  const int32_t* tokens = nullptr;    // [num_tokens]
  const StepGroup* groups = nullptr;  // [num_groups]
  int num_groups = 0;
  int q_heads = 0;
  bool op_by_op = false;  // runs the ops themselves, whatever the device has recorded
};

// Bias, qk-norm and RoPE on Q, K (bias on V) in place; then K loses its mean and Q and K are
// rotated, in place too; K and V rounded to the cache dtype, quantized and stored. With 16-bit
// blocks they are stored in 16 bit, in the 16-bit pool, and QuantizeBlocks follows.
struct WriteKvParams {
  float* qkv = nullptr;           // [num_tokens, q_heads + 2 * kv_heads, head_dim]
  const float* bias = nullptr;    // [q_heads + 2 * kv_heads, head_dim] or null
  const float* q_norm = nullptr;  // [head_dim] or null
  const float* k_norm = nullptr;  // [head_dim] or null
  float norm_eps = 1e-6f;
  const float* rope_cos = nullptr;  // [num_tokens, rope_dim / 2]; null: no RoPE
  const float* rope_sin = nullptr;  // [num_tokens, rope_dim / 2]
  int rope_dim = 0;  // the first rope_dim values rotate, halves paired (i, i + dim/2)
  int q_heads = 0;
  // Hadamard rotation of every Q and K head, normalized, over runs of RotationSize(head_dim).
  bool rotate = false;
  bool search_scales = false;     // FP4: the search rule of kv/codec.h, not the plain one
  const float* k_mean = nullptr;  // [kv_heads, head_dim] before the rotation, or null
  // [num_tokens, q_heads] out: q · k_mean of the head's group, what each score has lost. Written
  // when it and k_mean are set; sinks need it.
  float* q_dot_mean = nullptr;
  KvLayerView kv;
  KvLayerView window16 = {};  // mode none; data null where there is no 16-bit window
  BatchView batch;
  int64_t* num_nonfinite = nullptr;  // counter, added to (atomically); never null
  int64_t* num_clipped = nullptr;    // the same of values that the format clips, or null
};

// Values that one Hadamard rotation mixes: the largest power of two that divides head_dim.
inline constexpr int RotationSize(int head_dim) { return head_dim & -head_dim; }

// The moves of a batch: every slot of the 16-bit block, as stored, encoded into the quantized
// block. The same bytes as if the row had been encoded when it was written.
struct QuantizeBlocksParams {
  KvLayerView kv;
  KvLayerView window16 = {};  // mode none
  bool search_scales = false;
  const PendingQuantization* blocks_to_quantize = nullptr;  // [num_to_quantize], both ids valid
  int num_to_quantize = 0;
  int64_t* num_clipped = nullptr;  // as in WriteKvParams
};

// The cache of some sequences → dense FP32, values as stored (K after RoPE, mean and rotation),
// dequantized: what a query at position context_len - 1 sees.
struct FlattenKVParams {
  float* k = nullptr;  // [num_seqs, kv_heads, max_len, head_dim]
  float* v = nullptr;  // same; slots at or beyond context_len are not written
  int max_len = 0;
  KvLayerView kv;
  KvLayerView window16 = {};  // data null where there is no 16-bit window
  PrecisionWindow rule = {};
  BatchView batch;
};

// Attention of new tokens over the cache (their own K and V included, read back as stored).
//
// Defined arithmetic, the same for prefill and decode, so that logits do not depend on chunking,
// batching, prefix hits or the number of threads: positions are cut into splits of kSplitTokens and
// tiles of kTileTokens at absolute positions; FP32 online softmax over the tiles of a split, splits
// merged in order of position. With 16-bit blocks a tile is read up to twice, each time with the
// positions that the query sees there: first the quantized view, then the 16-bit one
// (kv/precision_window.h). The factor g of K is part of the scale of the quantized scores. The
// factor g of V multiplies the output; with 16-bit blocks it multiplies the softmax weight of every
// quantized value instead (the sum of weights stays without it).
struct AttentionParams {
  const float* q = nullptr;  // row i at q + i * q_stride: [q_heads, head_dim]
  int64_t q_stride = 0;      // floats between tokens (q lies inside qkv)
  float* out = nullptr;      // [num_tokens, q_heads, head_dim]
  int q_heads = 0;
  float softmax_scale = 1.f;
  bool exact = false;            // FP32 where integer codes would be computed in integers
  int window = 0;                // 0: full; else a query at p sees positions in (p - window, p]
  const float* sinks = nullptr;  // [q_heads] learned sink logits or null
  // [num_tokens, q_heads] of WriteKv where K has lost its mean: a sink's logit is lowered by
  // softmax_scale times it, as all scores are. Null: no mean.
  const float* q_dot_mean = nullptr;
  KvLayerView kv;
  KvLayerView window16 = {};  // mode none; data null where there is no 16-bit window
  PrecisionWindow rule = {};
  BatchView batch;
};

inline constexpr int kTileTokens = 64;
inline constexpr int kSplitTokens = 256;

// How a matrix is stored in a checkpoint. The rest of GGUF's types are expanded by the loader.
//   kMxfp4       GGUF's blocks of 17 bytes: E8M0 exponent e, then 16 bytes; byte j holds value j
//                (low nibble) and 16 + j (high nibble)
//   kMxfp4Split  Hugging Face's form: codes [rows, cols / 2], byte j of a row holds values 2j (low)
//                and 2j + 1 (high); the exponents apart, [rows, cols / 32]
// A value of MXFP4 is E2M1(code) * 2^(e - 127); e = 255 is NaN; cols is a multiple of 32.
enum class MatrixFormat : uint8_t { kF32, kBF16, kQ4_0, kQ4_1, kQ8_0, kMxfp4, kMxfp4Split };

TM_HD constexpr bool IsMxfp4(MatrixFormat format) {
  return format == MatrixFormat::kMxfp4 || format == MatrixFormat::kMxfp4Split;
}

// One matrix as it lies in the checkpoint: [rows, cols], rows are outputs.
struct MatrixSource {
  MatrixFormat format = MatrixFormat::kF32;
  const void* data = nullptr;
  int64_t rows = 0;
  int64_t cols = 0;
  const void* scales = nullptr;  // kMxfp4Split only
  // Holds data and scales where a device may read them in place, as long as it keeps a copy of
  // this; null: they may go once they are packed.
  std::shared_ptr<const void> owner = {};
  // data is what PackedMatrix::packed_data() of an equal matrix was; format is that matrix's.
  bool packed = false;
};

// A matrix packed by a device for its kernels. Made by Device::PackMatrix.
class PackedMatrix {
 public:
  virtual ~PackedMatrix() = default;
  int64_t rows = 0;
  int64_t cols = 0;
  MatrixFormat format = MatrixFormat::kF32;
  virtual int64_t num_bytes() const = 0;
  // [num_bytes()] that the device takes back as a packed source; null: it takes none.
  virtual const uint8_t* packed_data() const { return nullptr; }
};

struct LinearPart {
  const PackedMatrix* weight = nullptr;  // [outputs, cols]
  const float* bias = nullptr;           // [outputs] or null
};

// y = x · [w0; w1; ...]ᵀ + bias (+ y if accumulate): parts stacked along the outputs, each with a
// format of its own. Each output is summed in one fixed order over cols, whatever num_rows is.
struct LinearParams {
  const float* x = nullptr;  // [num_rows, cols], row stride x_stride floats
  int64_t x_stride = 0;
  const LinearPart* parts = nullptr;  // [num_parts], all with the same cols
  int num_parts = 0;
  float* y = nullptr;  // [num_rows, outputs of all parts], row stride y_stride floats
  int64_t y_stride = 0;
  int num_rows = 0;
  bool accumulate = false;
};

struct EmbedParams {
  const PackedMatrix* table = nullptr;  // [vocab, hidden]
  const int32_t* ids = nullptr;         // [num_tokens], each in [0, vocab)
  float* out = nullptr;                 // [num_tokens, hidden]
  int num_tokens = 0;
};

// cos and sin of RopeTable::Fill for the tokens of a step.
struct FillRopeParams {
  const RopeTable* table = nullptr;    // on the host
  const float* inv_freq = nullptr;     // [dim / 2] table->inv_freq(), on the device
  const int32_t* positions = nullptr;  // [num_tokens]
  float* cos = nullptr;                // [num_tokens, dim / 2]
  float* sin = nullptr;                // same
  int num_tokens = 0;
};

// out = x / rms(x) * weight; out may be x.
struct RmsNormParams {
  const float* x = nullptr;       // [num_rows, dim]
  const float* weight = nullptr;  // [dim]
  float* out = nullptr;           // [num_rows, dim]
  int num_rows = 0;
  int dim = 0;
  float eps = 1e-6f;
};

// kClampedSwiglu (GPT-OSS): g = min(gate, limit), u = clamp(up, -limit, limit);
// out = g * sigmoid(1.702 g) * (u + 1).
enum class Activation : uint8_t { kSilu, kGeluTanh, kClampedSwiglu };

// out = act(gate) * up
struct GatedActivationParams {
  const float* gate_up = nullptr;  // [num_rows, 2 * dim]: gate, then up
  float* out = nullptr;            // [num_rows, dim]
  int num_rows = 0;
  int dim = 0;
  Activation activation = Activation::kSilu;
  bool interleaved = false;  // a row of gate_up is gate0, up0, gate1, up1, ...
  float limit = 7.f;         // kClampedSwiglu
};

// The lowest id among the highest of each row, as greedy sampling chooses it; -1 for a row that it
// refuses: NaN or +infinity somewhere, -infinity everywhere.
struct ArgMaxRowsParams {
  const float* logits = nullptr;  // [num_rows, vocab_size]
  int32_t* ids = nullptr;         // [num_rows]
  int num_rows = 0;
  int vocab_size = 0;
};

// How the token of a row of logits is sampled: SamplingParams, the temperature not that of greedy
// sampling, and the number in [0, 1) that decides. What it means: ops/sampling_math.h.
struct RowSampling {
  double uniform = 0;
  int32_t row = 0;    // of the logits
  int32_t top_k = 0;  // 0: all
  float inverse_temperature = 1.f;
  float top_p = 1.f;
  float min_p = 0.f;
};

// The token of each sample, as the sampler chooses it; -1 where the device leaves that to the host:
// a row that the sampler refuses (NaN or +infinity somewhere, -infinity everywhere), or one of
// which too many tokens may be sampled.
struct SampleRowsParams {
  const float* logits = nullptr;           // rows of [vocab_size]
  const RowSampling* samplings = nullptr;  // [num_samplings] on the host
  int32_t* ids = nullptr;                  // [num_samplings]
  int num_samplings = 0;
  int vocab_size = 0;
};

// y = x · wᵀ + bias: rows [offsets[e], offsets[e + 1]) of y go through expert e's weight, [out,
// cols]; all weights have one shape and one format. A row of y has the bits of Linear with its row
// of x and its weight. The weights of experts without rows are not read.
struct GroupedLinearParams {
  const float* x = nullptr;  // rows of [cols], x_stride floats apart
  int64_t x_stride = 0;
  const int32_t* x_rows = nullptr;  // [num_rows] the row of x of each row of y; null: the same
  float* y = nullptr;               // [num_rows, out], rows y_stride floats apart
  int64_t y_stride = 0;
  const LinearPart* experts = nullptr;  // [num_experts]; stays where it is as long as its weights
  int num_experts = 0;
  const int32_t* offsets = nullptr;  // [num_experts + 1] of GroupRows; its last is num_rows
  int num_rows = 0;
};

// Softmax over all experts and the top_k highest of it; among equals the lower id, NaN last. A
// token's experts come in order of their ids, whatever the logits hold.
struct RouteExpertsParams {
  const float* logits = nullptr;  // [num_tokens, num_experts]
  int32_t* ids = nullptr;         // [num_tokens, top_k], ascending, each in [0, num_experts)
  float* weights = nullptr;       // [num_tokens, top_k]
  int num_tokens = 0;
  int num_experts = 0;
  int top_k = 0;           // 1 to num_experts
  bool normalize = false;  // the weights of a token sum to 1
};

// The (token, rank) pairs in order of their experts, those of one expert in order of tokens.
struct GroupRowsParams {
  const int32_t* ids = nullptr;  // [num_tokens, top_k] of RouteExperts
  int32_t* slots = nullptr;      // [num_tokens, top_k] where each pair lies in that order
  int32_t* x_rows = nullptr;     // [num_tokens * top_k] the token of each slot
  int32_t* offsets = nullptr;  // [num_experts + 1] the first slot of each expert, then their number
  int num_tokens = 0;
  int num_experts = 0;
  int top_k = 0;
};

// out[t] += sum over j, ascending, of w(t, j) * y[slots[t, j]], w being the weight or its sigmoid
struct CombineExpertsParams {
  const float* y = nullptr;        // rows of [dim]
  const int32_t* slots = nullptr;  // [num_tokens, top_k] or null: t * top_k + j
  const float* weights = nullptr;  // [num_tokens, top_k]
  bool sigmoid = false;
  float* out = nullptr;  // [num_tokens, dim]
  int num_tokens = 0;
  int top_k = 0;
  int dim = 0;
};

}  // namespace turbomind
