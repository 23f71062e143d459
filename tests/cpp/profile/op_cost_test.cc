#include "turbomind/profile/op_cost.h"

#include <doctest/doctest.h>

#include <cstdint>
#include <vector>

#include "kv/first_seen.h"
#include "turbomind/kv/precision_window.h"

using namespace turbomind;

namespace {

class FakeMatrix : public PackedMatrix {
 public:
  FakeMatrix(int64_t r, int64_t c, int64_t bytes) : bytes_(bytes) {
    rows = r;
    cols = c;
  }
  int64_t num_bytes() const override { return bytes_; }

 private:
  int64_t bytes_;
};

// Returns the view of a layer with 2 KV heads of 64 values. Only its sizes matter.
KvLayerView View(KvCacheMode format) {
  const block::Config config = {.layers = {{format, format}}, .kv_heads = 2, .head_dim = 64};
  return block::Layout(config).LayerView(0, nullptr, nullptr);
}

constexpr int64_t kNoneTokenBytes = 2 * 2 * 128;       // K and V, 2 heads, 64 BF16
constexpr int64_t kNvTokenBytes = 2 * 2 * (32 + 4);    // 64 nibbles, a scale per 16
constexpr int64_t kInt8TokenBytes = 2 * 2 * (64 + 4);  // codes, (scale, zero)

// Two sequences: one decodes position 299, and one prefills tokens 100 .. 139.
struct Batch {
  std::vector<int32_t> cu_seqlens = {0, 1, 41};
  std::vector<int32_t> context_lens = {300, 140};

  AttentionParams Params(KvCacheMode format) const {
    AttentionParams params;
    params.q_heads = 6;
    params.kv = View(format);
    params.batch = {.num_seqs = 2,
                    .num_decode = 1,
                    .num_tokens = 41,
                    .cu_seqlens = cu_seqlens.data(),
                    .context_lens = context_lens.data()};
    return params;
  }
};

// Numbers of positions that at least one query reads from each pool.
struct Seen {
  int64_t window16 = 0;
  int64_t quantized = 0;
};

Seen CountSeen(const PrecisionWindow& rule, int window, int first, int last) {
  Seen seen;
  for (int position = 0; position <= last; ++position) {
    bool window16 = false;
    bool quantized = false;
    for (int query = first; query <= last; ++query) {
      if (position <= query && position >= FirstSeen(window, query)) {
        (rule.IsInWindow16(position / rule.block_seq_len, query) ? window16 : quantized) = true;
      }
    }
    seen.window16 += window16;
    seen.quantized += quantized;
  }
  return seen;
}

}  // namespace

TEST_CASE("attention reads the K offset of each block once") {
  const Batch batch;
  AttentionParams params = batch.Params(KvCacheMode::kFp4Nv);
  const int64_t without = DecodeCost(params).kv_bytes;
  const block::Config config = {.layers = {{KvCacheMode::kFp4Nv, KvCacheMode::kFp4Nv}},
                                .kv_heads = 2,
                                .head_dim = 64,
                                .k_offset = true};
  params.kv = block::Layout(config).LayerView(0, nullptr, nullptr);
  CHECK(DecodeCost(params).kv_bytes == without + 5 * 2 * (64 + 4));  // 300 positions, 5 blocks
}

TEST_CASE("a linear layer reads its packed bytes once for any number of rows") {
  const FakeMatrix weight(32, 64, 1234);
  const std::vector<float> bias(32);
  LinearPart part = {&weight};
  LinearParams params = {.parts = &part, .num_parts = 1, .num_rows = 1};
  CHECK(CostOf(params).weight_bytes == 1234);
  CHECK(CostOf(params).activation_bytes == 4 * (64 + 32));
  params.num_rows = 7;
  CHECK(CostOf(params).weight_bytes == 1234);
  params.accumulate = true;
  part.bias = bias.data();
  CHECK(CostOf(params).activation_bytes == 4 * (7 * (64 + 2 * 32) + 32));
}

TEST_CASE("the parts of a linear layer share one read of its input") {
  const FakeMatrix first(32, 64, 1000), second(16, 64, 300);
  const LinearPart parts[] = {{&first}, {&second}};
  const OpCost cost = CostOf(LinearParams{.parts = parts, .num_parts = 2, .num_rows = 3});
  CHECK(cost.weight_bytes == 1300);
  CHECK(cost.activation_bytes == 4 * 3 * (64 + 48));
}

TEST_CASE("experts without rows cost nothing, and embedding reads one row per token") {
  const FakeMatrix used(32, 64, 1000), unused(32, 64, 5000);
  const LinearPart experts[] = {{&used}, {&unused}};
  const int32_t offsets[] = {0, 3, 3};
  const GroupedLinearParams params = {.experts = experts, .num_experts = 2};
  CHECK(CostOf(params, offsets).weight_bytes == 1000);
  const FakeMatrix table(100, 64, 100 * 128);
  CHECK(CostOf(EmbedParams{.table = &table, .num_tokens = 5}).weight_bytes == 5 * 128);
}

TEST_CASE("attention reads payload and scales of all visible positions") {
  const Batch batch;
  const AttentionParams none = batch.Params(KvCacheMode::kNone);
  CHECK(DecodeCost(none).kv_bytes == 300 * kNoneTokenBytes);
  CHECK(PrefillCost(none).kv_bytes == 140 * kNoneTokenBytes);
  CHECK(DecodeCost(batch.Params(KvCacheMode::kFp4Nv)).kv_bytes == 300 * kNvTokenBytes);
  CHECK(PrefillCost(batch.Params(KvCacheMode::kInt8)).kv_bytes == 140 * kInt8TokenBytes);
  CHECK(DecodeCost(none).activation_bytes == 2 * 1 * 6 * 64 * 4);
  CHECK(PrefillCost(none).activation_bytes == 2 * 40 * 6 * 64 * 4);
}

TEST_CASE("attention reads the 16-bit window and the quantized pool in their formats") {
  std::byte byte{};
  for (const int window : {0, 30, 100, 200}) {
    for (const int first : {0, 5, 63, 64, 127, 200, 600}) {
      for (const int tokens : {1, 40, 130}) {
        CAPTURE(window);
        CAPTURE(first);
        CAPTURE(tokens);
        const int32_t cu_seqlens[] = {0, tokens};
        const int32_t context_lens[] = {first + tokens};
        AttentionParams params;
        params.q_heads = 2;
        params.window = window;
        params.kv = View(KvCacheMode::kFp4Nv);
        params.window16 = View(KvCacheMode::kNone);
        params.window16.data = &byte;
        params.rule = {.block_seq_len = 64, .sink_blocks = 1, .recent_blocks = 1};
        params.batch = {.num_seqs = 1, .cu_seqlens = cu_seqlens, .context_lens = context_lens};
        const Seen seen = CountSeen(params.rule, window, first, first + tokens - 1);
        CHECK(PrefillCost(params).kv_bytes ==
              seen.window16 * kNoneTokenBytes + seen.quantized * kNvTokenBytes);
      }
    }
  }
}

TEST_CASE("ops write new rows and quantized blocks in the format of their pool") {
  const Batch batch;
  std::byte byte{};
  WriteKvParams params;
  params.q_heads = 6;
  params.rope_dim = 64;
  params.kv = View(KvCacheMode::kFp4Nv);
  params.batch = batch.Params(KvCacheMode::kNone).batch;
  CHECK(CostOf(params).kv_bytes == 41 * kNvTokenBytes);
  CHECK(CostOf(params).activation_bytes == 41 * 4 * ((6 + 4) * 64 + (6 + 2) * 64 + 64));
  params.window16 = View(KvCacheMode::kNone);
  params.window16.data = &byte;
  CHECK(CostOf(params).kv_bytes == 41 * kNoneTokenBytes);
  const QuantizeBlocksParams blocks_to_quantize = {
      .kv = params.kv, .window16 = params.window16, .num_to_quantize = 3};
  CHECK(CostOf(blocks_to_quantize).kv_bytes == 3 * 64 * (kNvTokenBytes + kNoneTokenBytes));
  FlattenKVParams flat;
  flat.kv = params.kv;
  flat.batch = params.batch;
  CHECK(CostOf(flat).kv_bytes == (300 + 140) * kNvTokenBytes);
  CHECK(CostOf(flat).activation_bytes == (300 + 140) * 2 * 2 * 64 * 4);
}

TEST_CASE("recurrent layers read a state that exists, and write it once more for each save") {
  const Batch batch;
  GatedDeltaParams delta;
  delta.heads.key_heads = 2;
  delta.heads.value_heads = 4;
  delta.heads.key_dim = 32;
  delta.heads.value_dim = 16;
  delta.heads.batch = batch.Params(KvCacheMode::kNone).batch;
  constexpr int64_t kState = 4 * 4 * 32 * 16;
  CHECK(CostOf(delta).kv_bytes == 4 * kState);
  CHECK(CostOf(delta).activation_bytes == 4 * (41 * (2 * 2 * 32 + 2 * 4 * 16 + 2 * 4) + 2 * 4));
  delta.heads.states.num_saves = 3;
  CHECK(CostOf(delta).kv_bytes == 7 * kState);
  Batch fresh;
  fresh.context_lens = {300, 40};  // the prompt begins in this step
  delta.heads.batch = fresh.Params(KvCacheMode::kNone).batch;
  CHECK(CostOf(delta).kv_bytes == 6 * kState);
  const SelectiveScanParams scan = {.heads = delta.heads};
  CHECK(CostOf(scan).kv_bytes == 6 * kState);
  CHECK(CostOf(scan).activation_bytes == 4 * (41 * (2 * 2 * 32 + 2 * 4 * 16 + 4) + 3 * 4));

  const float bias = 0;
  ShortConvolutionParams convolution;
  convolution.bias = &bias;
  convolution.channels = 32;
  convolution.kernel = 4;
  convolution.batch = delta.heads.batch;
  CHECK(CostOf(convolution).kv_bytes == 3 * 4 * 3 * 32);
  CHECK(CostOf(convolution).activation_bytes == 4 * 32 * (2 * 41 + 4 + 1));
  convolution.in_gate = &bias;
  CHECK(CostOf(convolution).activation_bytes == 4 * 32 * (3 * 41 + 4 + 1));
  convolution.out_gate = &bias;
  CHECK(CostOf(convolution).activation_bytes == 4 * 32 * (4 * 41 + 4 + 1));
  GatedNormParams norm = {.num_rows = 5, .dim = 64, .group = 16};
  CHECK(CostOf(norm).activation_bytes == 4 * 3 * 5 * 64);
  norm.weight = &bias;
  CHECK(CostOf(norm).activation_bytes == 4 * (3 * 5 + 1) * 64);
  CHECK(CostOf(SigmoidGateParams{.count = 10}).activation_bytes == 120);
}
