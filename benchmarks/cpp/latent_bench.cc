// Measures decode attention over latents on the CPU, for each KV format. Prints one line of JSON
// per format. Usage:
//   latent_bench threads=2 heads=16 rank=512 rotary=64 context=8192 pool_mb=256 round_ms=300
//     formats=none,int8,nvfp4 rotate=1 offset=1
// With an offset, every block of quantized latents has one (kv/k_offset.h).
// A step of one sequence cycles through layers of pool_mb together, so that it finds no latents in
// a cache. A figure is the median of five rounds, and seconds are those of the clock: the machine
// must be idle. `speedup` is that over the first format.

#include <algorithm>
#include <numeric>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "bench_device.h"
#include "bench_line.h"
#include "turbomind/kv/k_offset.h"
#include "turbomind/kv/layout.h"
#include "turbomind/ops/latent.h"

namespace turbomind::bench {
namespace {

constexpr int kBlock = 64;

struct Shape {
  explicit Shape(Cell& arguments)
      : threads(std::max(1, arguments.Number("threads", 2))),
        heads(arguments.Number("heads", 16)),
        rank(arguments.Number("rank", 512)),
        rotary(arguments.Number("rotary", 64)),
        context(std::max(2, arguments.Number("context", 8192))),
        pool_bytes(int64_t{arguments.Number("pool_mb", 256)} << 20),
        round_seconds(arguments.Number("round_ms", 300) * 1e-3),
        exact(arguments.Number("exact", 0) != 0),
        rotate(arguments.Number("rotate", 0) != 0),
        offset(arguments.Number("offset", 0) != 0),
        formats(arguments.Text("formats", "none,int8,fp8,int4,mxfp4,nvfp4")) {}

  int threads;
  int heads;
  int rank;
  int rotary;
  int context;
  int64_t pool_bytes;
  double round_seconds;
  bool exact;
  bool rotate;
  bool offset;
  std::string formats;
};

// A decode step over the layers of one pool.
class LatentStep {
 public:
  LatentStep(Device& device, const Shape& shape, KvCacheMode format)
      : device_(device),
        shape_(shape),
        layout_({.layers = {{KvCacheMode::kNone, format}},
                 .kv_heads = 1,
                 .head_dim = shape.rank,
                 .rotary_dim = shape.rotary,
                 .block_seq_len = kBlock,
                 .k_offset = shape.offset}),
        blocks_((shape.context + kBlock - 1) / kBlock),
        layer_bytes_(blocks_ * (layout_.block_bytes() + layout_.scale_block_bytes())),
        num_layers_(static_cast<int>(std::max<int64_t>(shape.pool_bytes / layer_bytes_, 1))),
        pool_(device, static_cast<size_t>(num_layers_ * layer_bytes_)),
        q_(Random(int64_t{shape.heads} * (shape.rank + shape.rotary))),
        out_(static_cast<size_t>(shape.heads) * static_cast<size_t>(shape.rank)) {
    table_.resize(static_cast<size_t>(blocks_));
    std::iota(table_.begin(), table_.end(), 0);
    for (int layer = 0; layer < num_layers_; ++layer) {
      Fill(View(layer));
    }
  }

  int num_layers() const { return num_layers_; }
  int64_t bytes() const { return layer_bytes_; }

  void Run() {
    const std::vector<int32_t> lens = {0, 1};
    const std::vector<int32_t> contexts = {shape_.context};
    const std::vector<int32_t> positions = {shape_.context - 1};
    const int64_t rank_size = int64_t{shape_.heads} * shape_.rank;
    for (int layer = 0; layer < num_layers_; ++layer) {
      invokeLatentAttention(device_, {.q = q_.data(),
                                      .q_stride = rank_size,
                                      .q_rotary = q_.data() + rank_size,
                                      .q_rotary_stride = int64_t{shape_.heads} * shape_.rotary,
                                      .q_rotary_head_stride = shape_.rotary,
                                      .out = out_.data(),
                                      .q_heads = shape_.heads,
                                      .softmax_scale = 0.07f,
                                      .rotate = shape_.rotate,
                                      .exact = shape_.exact,
                                      .kv = View(layer),
                                      .batch = {.num_seqs = 1,
                                                .num_decode = 1,
                                                .num_tokens = 1,
                                                .cu_seqlens = lens.data(),
                                                .context_lens = contexts.data(),
                                                .positions = positions.data(),
                                                .block_tables = table_.data(),
                                                .block_table_stride = blocks_}});
    }
  }

 private:
  std::vector<float> Random(int64_t size) {
    std::normal_distribution<float> normal;
    std::vector<float> values(static_cast<size_t>(size));
    std::generate(values.begin(), values.end(), [&] { return normal(random_); });
    return values;
  }

  KvLayerView View(int layer) const {
    std::byte* data = pool_.As<std::byte>() + layer * layer_bytes_;
    return layout_.LayerView(0, data, data + blocks_ * layout_.block_bytes());
  }

  // Writes a random latent at every position, and random offsets.
  void Fill(KvLayerView view) {
    for (int64_t block = 0; view.HasKOffset() && block < blocks_; ++block) {
      std::vector<float> offset = Random(shape_.rank);
      StoreKOffset(view.KOffset(block, 0), shape_.rank, view.dtype, 1, offset.data());
    }
    view.k_offset_codes = view.k_offset_params = 0;  // rows are written as they are
    std::vector<float> rows = Random(int64_t{shape_.context} * (shape_.rank + shape_.rotary));
    std::vector<float> q = Random(int64_t{shape_.context} * shape_.rotary);
    std::vector<int32_t> positions(static_cast<size_t>(shape_.context));
    std::iota(positions.begin(), positions.end(), 0);
    const std::vector<float> angles(q.size(), 0.7f);
    const std::vector<int32_t> lens = {0, shape_.context};
    const std::vector<int32_t> contexts = {shape_.context};
    int64_t num_nonfinite = 0;
    invokeWriteLatents(device_, {.q = q.data(),
                                 .rows = rows.data(),
                                 .q_heads = 1,
                                 .rope_cos = angles.data(),
                                 .rope_sin = angles.data(),
                                 .kv = view,
                                 .batch = {.num_seqs = 1,
                                           .num_tokens = shape_.context,
                                           .cu_seqlens = lens.data(),
                                           .context_lens = contexts.data(),
                                           .positions = positions.data(),
                                           .block_tables = table_.data(),
                                           .block_table_stride = blocks_},
                                 .num_nonfinite = &num_nonfinite});
  }

  Device& device_;
  const Shape& shape_;
  block::Layout layout_;
  int64_t blocks_;
  int64_t layer_bytes_;
  int num_layers_;
  DeviceBuffer pool_;
  std::mt19937 random_{1};
  std::vector<float> q_, out_;
  std::vector<int32_t> table_;
};

int Main(int argc, char** argv) {
  Cell arguments(argc, argv);
  const Shape shape(arguments);
  arguments.RequireAllRead();
  const auto device = MakeCpuDevice(shape.threads);
  std::istringstream formats(shape.formats);
  double first = 0;
  for (std::string name; std::getline(formats, name, ',');) {
    LatentStep step(*device, shape, ParseKvFormat(name).format);
    const Timing timing =
        Measure(*device, step.num_layers(), shape.round_seconds, [&] { step.Run(); });
    first = first == 0 ? timing.median : first;
    Json()
        .Add("device", device->name())
        .Add("format", name)
        .Add("heads", int64_t{shape.heads})
        .Add("context", int64_t{shape.context})
        .Add("offset", int64_t{shape.offset ? 1 : 0})
        .Add("bytes", step.bytes())
        .Add("us", timing.median)
        .Add("gb_per_s", static_cast<double>(step.bytes()) / timing.median * 1e-3)
        .Add("speedup", first / timing.median)
        .Print();
  }
  return 0;
}

}  // namespace
}  // namespace turbomind::bench

int main(int argc, char** argv) {
  return turbomind::bench::RunMain("latent_bench", turbomind::bench::Main, argc, argv);
}
