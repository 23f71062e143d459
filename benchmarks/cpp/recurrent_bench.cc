// Measures the gated delta rule (rule=delta) or the selective scan (rule=scan) on the CPU: decode
// steps beside a copy of the same bytes with the same threads, and prompts. Prints one line of JSON
// per figure. Usage:
//   recurrent_bench threads=2 rule=delta heads=16 key_heads=16 key_dim=128 value_dim=128
//     prompt=512 pool_mb=512 round_ms=200
// Steps cycle through layers of pool_mb together, so that no decode step finds its states in a
// cache. A figure is the median of five rounds, and seconds are those of the clock: the machine
// must be idle.

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "bench_device.h"
#include "bench_line.h"
#include "turbomind/ops/recurrent.h"

namespace turbomind::bench {
namespace {

struct Shape {
  explicit Shape(Cell& arguments)
      : threads(std::max(1, arguments.Number("threads", 2))),
        rule(arguments.Text("rule", "delta")),
        heads(arguments.Number("heads", 16)),
        key_heads(arguments.Number("key_heads", heads)),
        key_dim(arguments.Number("key_dim", 128)),
        value_dim(arguments.Number("value_dim", key_dim)),
        prompt(std::max(2, arguments.Number("prompt", 512))),
        pool_bytes(size_t{static_cast<unsigned>(arguments.Number("pool_mb", 512))} << 20),
        round_seconds(arguments.Number("round_ms", 200) * 1e-3) {
    if (rule != "delta" && rule != "scan") {
      throw std::invalid_argument("rule is " + rule + ". It must be delta or scan.");
    }
  }

  int64_t row_size() const { return int64_t{2} * key_heads * key_dim + int64_t{heads} * value_dim; }
  size_t state_bytes() const {
    return static_cast<size_t>(heads) * static_cast<size_t>(key_dim) *
           static_cast<size_t>(value_dim) * sizeof(float);
  }

  int threads;
  std::string rule;
  int heads;
  int key_heads;
  int key_dim;
  int value_dim;
  int prompt;
  size_t pool_bytes;
  double round_seconds;
};

// A step of `num_seqs` sequences, which have states from earlier steps.
class HeadsStep {
 public:
  HeadsStep(Device& device, const Shape& shape, int num_seqs, int num_tokens, std::byte* pool)
      : device_(device),
        scans_(shape.rule == "scan"),
        layer_bytes_(static_cast<size_t>(num_seqs) * shape.state_bytes()),
        pool_(pool),
        num_layers_(num_tokens > 1 || shape.pool_bytes < layer_bytes_
                        ? 1
                        : static_cast<int>(shape.pool_bytes / layer_bytes_)) {
    const int64_t keys = int64_t{shape.key_heads} * shape.key_dim;
    const int64_t rows = int64_t{num_seqs} * num_tokens;
    qkv_ = Random(rows * shape.row_size());
    gates_ = Random(rows * 2 * shape.heads);
    of_head_.assign(static_cast<size_t>(shape.heads), 0.1f);
    out_.resize(static_cast<size_t>(rows * shape.heads * shape.value_dim));
    for (int seq = 0; seq < num_seqs; ++seq) {
      slots_.push_back(seq);
      cu_seqlens_.push_back(cu_seqlens_.back() + num_tokens);
      context_lens_.push_back(1 + num_tokens);
      positions_.resize(positions_.size() + static_cast<size_t>(num_tokens));
      std::iota(positions_.end() - num_tokens, positions_.end(), 1);
    }
    heads_ = {.q = qkv_.data(),
              .k = qkv_.data() + keys,
              .v = qkv_.data() + 2 * keys,
              .qkv_stride = shape.row_size(),
              .a = gates_.data() + shape.heads,
              .gate_stride = int64_t{2} * shape.heads,
              .decay = of_head_.data(),
              .dt_bias = of_head_.data(),
              .out = out_.data(),
              .key_heads = shape.key_heads,
              .value_heads = shape.heads,
              .key_dim = shape.key_dim,
              .value_dim = shape.value_dim,
              .state = {pool, static_cast<int64_t>(shape.state_bytes())},
              .states = {.slots = slots_.data()},
              .batch = {.num_seqs = num_seqs,
                        .num_decode = num_tokens == 1 ? num_seqs : 0,
                        .num_tokens = cu_seqlens_.back(),
                        .cu_seqlens = cu_seqlens_.data(),
                        .context_lens = context_lens_.data(),
                        .positions = positions_.data()}};
  }

  int num_layers() const { return num_layers_; }
  int64_t bytes() const { return 2 * static_cast<int64_t>(layer_bytes_); }

  // Computes the step for every layer.
  void Run() {
    for (int layer = 0; layer < num_layers_; ++layer) {
      heads_.state.data = pool_ + static_cast<size_t>(layer) * layer_bytes_;
      if (scans_) {
        invokeSelectiveScan(device_, {.heads = heads_, .skip = of_head_.data()});
      } else {
        invokeGatedDelta(device_, {.heads = heads_, .b = gates_.data()});
      }
    }
  }

 private:
  std::vector<float> Random(int64_t size) {
    std::normal_distribution<float> normal;
    std::vector<float> values(static_cast<size_t>(size));
    std::generate(values.begin(), values.end(), [&] { return normal(random_); });
    return values;
  }

  Device& device_;
  bool scans_;
  size_t layer_bytes_;
  std::byte* pool_;
  int num_layers_;
  std::mt19937 random_{1};
  std::vector<float> qkv_, gates_, of_head_, out_;
  std::vector<int32_t> slots_, cu_seqlens_ = {0}, context_lens_, positions_;
  StateHeads heads_;
};

// Returns the bytes per microsecond that all threads read and write when they copy the pool.
double MeasureCopy(Device& device, const Shape& shape, std::byte* from) {
  const DeviceBuffer to(device, shape.pool_bytes);
  const int64_t pieces = 4 * int64_t{shape.threads};
  const size_t piece = shape.pool_bytes / static_cast<size_t>(pieces);
  const Timing timing = Measure(device, 1, shape.round_seconds, [&] {
    device.ForEachOnHost(pieces, [&](int64_t item, int) {
      const size_t at = static_cast<size_t>(item) * piece;
      std::memcpy(to.As<std::byte>() + at, from + at, piece);
    });
  });
  return 2 * static_cast<double>(piece * static_cast<size_t>(pieces)) / timing.median;
}

int Main(int argc, char** argv) {
  Cell arguments(argc, argv);
  const Shape shape(arguments);
  arguments.RequireAllRead();
  const auto device = MakeCpuDevice(shape.threads);
  const DeviceBuffer pool(*device, shape.pool_bytes);
  std::memset(pool.As<std::byte>(), 0, shape.pool_bytes);  // takes the pages
  const double copy = MeasureCopy(*device, shape, pool.As<std::byte>());
  Json().Add("device", device->name()).Add("copy_gb_per_s", copy * 1e-3).Print();
  for (const int num_seqs : {1, 8}) {
    HeadsStep step(*device, shape, num_seqs, 1, pool.As<std::byte>());
    const Timing timing =
        Measure(*device, step.num_layers(), shape.round_seconds, [&] { step.Run(); });
    const double speed = static_cast<double>(step.bytes()) / timing.median;
    Json()
        .Add("decode_sequences", int64_t{num_seqs})
        .Add("us", timing.median)
        .Add("gb_per_s", speed * 1e-3)
        .Add("of_copy", speed / copy)
        .Print();
  }
  HeadsStep step(*device, shape, 1, shape.prompt, pool.As<std::byte>());
  const Timing timing =
      Measure(*device, step.num_layers(), shape.round_seconds, [&] { step.Run(); });
  Json()
      .Add("prompt", int64_t{shape.prompt})
      .Add("us", timing.median)
      .Add("tokens_per_s", shape.prompt * 1e6 / timing.median)
      .Print();
  return 0;
}

}  // namespace
}  // namespace turbomind::bench

int main(int argc, char** argv) {
  return turbomind::bench::RunMain("recurrent_bench", turbomind::bench::Main, argc, argv);
}
