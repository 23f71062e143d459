// The kernels that read the KV cache into dense rows (backend/cuda/kv/kv_ops.h), run thread by
// thread on the CPU.

#include <doctest/doctest.h>

#include <algorithm>
#include <functional>
#include <vector>

#include "cuda/kv_step.h"
#include "kv/first_seen.h"
#include "turbomind/backend/cuda/kv/kv_ops.h"
#include "turbomind/kv/codec.h"
#include "turbomind/kv/k_offset.h"

namespace turbomind::cuda::kv_step {
namespace {

// Replace random scale bytes by scales that the encoder can store.
void MakeScalesLegal(Step& step) {
  const KvLayerView view = step.layout.LayerView(0, step.data.data(), step.scales.data());
  const int stride = view.ScaleStride();
  for (size_t i = 0; i < step.scales.size(); ++i) {
    const int side = static_cast<int>(i) % stride < view.scale_bytes[0] ? 0 : 1;
    const int byte = static_cast<int>(step.scales[i]);
    step.scales[i] = static_cast<std::byte>(view.format[side] == KvCacheMode::kFp4Mx
                                                ? kMxMinByte + byte % (kMxMaxByte - kMxMinByte + 1)
                                                : byte % (kNvMaxByte + 1));
  }
}

TEST_CASE("FlattenKV in FP32 has the CPU's bits") {
  unsigned seed = 0;
  for (const FormatPair& formats : ListedPairs()) {
    for (int head_dim : {64, 80, 96, 128, 256, 512}) {
      for (bool window16 : {false, true}) {
        Shape shape = {.formats = formats, .dtype = kTypes[++seed % 2], .head_dim = head_dim};
        shape.contexts[1] = 2 * shape.block_seq_len;  // its last position ends a block
        shape.k_offset = seed % 4 < 2;
        shape.window_format = WindowFormat(formats, seed % 4 < 3);
        Step step(shape, seed);
        step.window16 = window16;
        step.tables[1] = -1;
        MakeScalesLegal(step);
        CAPTURE(Describe(shape));
        constexpr int kMaxLen = 40;
        const size_t size = shape.contexts.size() * static_cast<size_t>(2 * kMaxLen * head_dim);
        std::vector<float> k(size, -7.f);
        std::vector<float> v(size, -7.f);
        const Gpu gpu;
        const GpuStep on_gpu(gpu, step);
        const GpuArray<float> gpu_k(gpu.stream(), k);
        const GpuArray<float> gpu_v(gpu.stream(), v);
        FlattenKVParams params;
        params.max_len = kMaxLen;
        params.rule = window16 ? PrecisionWindow{shape.block_seq_len, 1, 0} : PrecisionWindow{};
        const auto with = [&](const Pointers& p, float* to_k, float* to_v) {
          params.k = to_k;
          params.v = to_v;
          params.kv = ViewOf(step, p);
          params.window16 = Window16ViewOf(step, p);
          params.batch = BatchOf(step, p);
          return params;
        };
        CudaFlattenKV(gpu.context, with(on_gpu.pointers(), gpu_k.data(), gpu_v.data()));
        Cpu().FlattenKV(with(CpuPointers(step), k.data(), v.data()));
        CHECK(SameFloats(gpu_k.Read(), k));
        CHECK(SameFloats(gpu_v.Read(), v));
      }
    }
  }
}

// Decode one position, without the global scale unless it has a K offset. Return zeros if its block
// is missing.
std::vector<float> Decoded(Step& step, const KvLayerView& view, const FlattenSpan& span, int t,
                           KvSide side, int head) {
  const int s = static_cast<int>(side);
  const int index = t / view.block_seq_len;
  const int block = step.tables[static_cast<size_t>(span.sequence * step.table_stride + index)];
  std::vector<float> row(static_cast<size_t>(view.head_dim));
  if (block < 0) {
    return row;
  }
  const bool has_offset = side == KvSide::kK && view.HasKOffset();
  const float* scales = view.global_scale[s];
  const float global_scale = has_offset && scales != nullptr ? scales[head] : 1.f;
  const KvRow from = view.Row(side, block, head, t % view.block_seq_len);
  DispatchFormat(view.format[s], [&]<KvCacheMode M>() {
    Codec<M>::DecodeRow(from.payload, from.metadata, view.head_dim, view.dtype, global_scale,
                        row.data());
  });
  if (has_offset) {
    std::vector<float> offset(row.size());
    const KvRow at = view.KOffset(block, head);
    KOffsetCodec::DecodeRow(at.payload, at.metadata, view.head_dim, view.dtype, 1.f, offset.data());
    std::transform(offset.begin(), offset.end(), row.begin(), row.begin(), std::plus<>());
  }
  return row;
}

// `rounds` means that a BF16 cache is converted to FP16, or that a K offset was added.
bool IsExpected(uint16_t got, float want, KvCacheMode format, DataType dtype, bool rounds) {
  if (IsNan(want)) {
    return true;  // E4M3 has no NaN on a GPU without conversion instructions
  }
  const bool is_int = format == KvCacheMode::kInt8 || format == KvCacheMode::kInt4;
  if (format == KvCacheMode::kNone && !rounds) {
    return RoundTo(want, dtype) == LoadAs(reinterpret_cast<const uint8_t*>(&got), dtype, 0);
  }
  if (is_int || rounds) {
    return got == FloatToHalf(std::clamp(want, -65504.f, 65504.f));
  }
  return HalfToFloat(got) == want;
}

TEST_CASE("flattened 16-bit rows hold the values without their scale g" *
          doctest::test_suite("small")) {
  unsigned seed = 0;
  for (const FormatPair& formats : ListedPairs()) {
    for (int head_dim : {64, 80, 96, 128, 256}) {
      Shape shape = {.formats = formats, .dtype = kTypes[++seed % 2], .head_dim = head_dim};
      shape.k_offset = seed % 3 != 0;
      Step step(shape, seed);
      step.tables[static_cast<size_t>(2 * step.table_stride)] = -1;
      MakeScalesLegal(step);
      CAPTURE(Describe(shape));
      // The spans begin and end inside blocks; sequence 2 has two spans.
      const std::vector<FlattenSpan> spans = {{0, 3, 0}, {2, 0, 18}, {2, 32, 35}, {1, 17, 36}};
      constexpr int kRows = 37;
      const size_t size = static_cast<size_t>(shape.kv_heads * kRows * head_dim);
      const Gpu gpu;
      const GpuArray<uint16_t> k(gpu.stream(), std::vector<uint16_t>(size, 0xffff));
      const GpuArray<uint16_t> v(gpu.stream(), std::vector<uint16_t>(size, 0xffff));
      const GpuStep on_gpu(gpu, step);
      const bool all_half = seed % 4 >= 2;
      FlattenHalfParams params = {.k = k.data(),
                                  .v = v.data(),
                                  .num_rows = kRows,
                                  .num_spans = static_cast<int>(spans.size()),
                                  .kv = ViewOf(step, on_gpu.pointers()),
                                  .block_tables = on_gpu.tables.data(),
                                  .block_table_stride = step.table_stride,
                                  .all_half = all_half};
      std::copy(spans.begin(), spans.end(), params.spans);
      CudaFlattenToHalf(gpu.context, params);
      const KvLayerView view = ViewOf(step, CpuPointers(step));
      int wrong = 0;
      for (KvSide side : {KvSide::kK, KvSide::kV}) {
        const std::vector<uint16_t> got = (side == KvSide::kK ? k : v).Read();
        for (int row = 0; row < kRows; ++row) {
          const auto after =
              std::upper_bound(spans.begin(), spans.end(), row,
                               [](int r, const FlattenSpan& s) { return r < s.row; });
          const FlattenSpan& span = *(after - 1);
          for (int head = 0; head < shape.kv_heads; ++head) {
            const std::vector<float> want =
                Decoded(step, view, span, span.begin + row - span.row, side, head);
            for (int d = 0; d < head_dim; ++d) {
              const KvCacheMode format = view.format[static_cast<int>(side)];
              const bool rounds =
                  (side == KvSide::kK && view.HasKOffset()) ||
                  (all_half && format == KvCacheMode::kNone && shape.dtype == DataType::kBFloat16);
              wrong += !IsExpected(got[static_cast<size_t>((head * kRows + row) * head_dim + d)],
                                   want[static_cast<size_t>(d)], format, shape.dtype, rounds);
            }
          }
        }
      }
      CHECK(wrong == 0);
    }
  }
}

TEST_CASE("the spans of a chunk cover the positions that its queries see in each view") {
  constexpr int kLength = 4;  // positions per block
  for (const PrecisionWindow& rule :
       {PrecisionWindow{}, PrecisionWindow{kLength, 0, 0}, PrecisionWindow{kLength, 1, 0},
        PrecisionWindow{kLength, 2, 1}}) {
    for (int window : {0, 1, 5, 13, -1, -6, -8}) {
      for (int context = 1; context <= 30; ++context) {
        for (int first = 0; first < context; ++first) {
          const SeenSpans spans = SpansOf(rule, window, first, context);
          int wrong = 0;
          for (int t = 0; t < context; ++t) {
            bool quantized = false;
            bool window16 = false;
            for (int p = std::max(first, t); p < context; ++p) {
              const bool seen = t >= FirstSeen(window, p);
              const bool is_in_window16 = rule.enabled() && rule.IsInWindow16(t / kLength, p);
              quantized = quantized || (seen && !is_in_window16);
              window16 = window16 || (seen && is_in_window16);
            }
            const auto in = [&](const PositionSpan& s) { return t >= s.begin && t < s.end; };
            const bool in_window16 = in(spans.sinks) || in(spans.recent);
            wrong += (quantized && !in(spans.quantized)) || (window16 && !in_window16);
            if (window == 0) {
              wrong += quantized != in(spans.quantized) || window16 != in_window16;
            }
            wrong += in(spans.sinks) && in(spans.recent);
          }
          CAPTURE(window);
          CAPTURE(context);
          CAPTURE(first);
          CHECK(wrong == 0);
        }
      }
    }
  }
}

}  // namespace
}  // namespace turbomind::cuda::kv_step
