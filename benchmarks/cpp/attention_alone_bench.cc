// Decode attention of one layer over a paged cache, for benchmarks/attention_alone.py: prints one
// JSON object with the bytes that a call reads and the seconds of each round. Usage, with defaults:
//   attention_alone_bench mode=nvfp4 context=8192 batch=8 kv_heads=3 group=3 head_dim=64 threads=1
//     rounds=5 isa=BEST
// A round repeats the call for at least 50 ms, after one call that does not count. Every block
// holds the same random rows at an address of its own.

#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <map>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "run_main.h"
#include "turbomind/backend/cpu/cpu_device.h"
#include "turbomind/backend/cpu/cpu_kv_ops.h"
#include "turbomind/backend/cpu/packed_matrix.h"
#include "turbomind/kv/codec.h"
#include "turbomind/kv/layout.h"

namespace turbomind {
namespace {

constexpr double kRoundSeconds = 0.05;
constexpr int kBlockTokens = 64;

using Arguments = std::map<std::string, std::string>;

int Number(const Arguments& arguments, const std::string& key, int most) {
  const std::string& text = arguments.at(key);
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 1 || value > most) {
    throw std::invalid_argument(key + ": got " + text + ", wanted 1 to " + std::to_string(most));
  }
  return value;
}

Arguments Parse(int argc, char** argv) {
  Arguments arguments = {
      {"mode", "nvfp4"}, {"context", "8192"}, {"batch", "8"},
      {"kv_heads", "3"}, {"group", "3"},      {"head_dim", "64"},
      {"threads", "1"},  {"rounds", "5"},     {"isa", AvailableCpuIsas().back()}};
  for (int i = 1; i < argc; ++i) {
    const std::string text = argv[i];
    const size_t at = text.find('=');
    if (at == std::string::npos || !arguments.contains(text.substr(0, at))) {
      std::string keys;
      for (const auto& [key, value] : arguments) {
        keys += " " + key;
      }
      throw std::invalid_argument("got " + text + ", wanted key=value with one of" + keys);
    }
    arguments[text.substr(0, at)] = text.substr(at + 1);
  }
  return arguments;
}

struct Shape {
  explicit Shape(const Arguments& a)
      : mode(GetKvCacheMode(a.at("mode"), DeviceCapability())),
        context(Number(a, "context", 1 << 20)),
        batch(Number(a, "batch", 1024)),
        kv_heads(Number(a, "kv_heads", 128)),
        group(Number(a, "group", 64)),
        head_dim(Number(a, "head_dim", 256)) {}
  KvCacheMode mode;
  int context;
  int batch;
  int kv_heads;
  int group;
  int head_dim;
};

// The pools of one layer, in memory as the engine has it; blocks in descending order.
class Pools {
 public:
  explicit Pools(const Shape& shape)
      : shape_(shape),
        layout_(ConfigOf(shape)),
        blocks_((shape.context - 1) / kBlockTokens + 1),
        data_(int64_t{blocks_} * shape.batch * layout_.block_bytes()),
        scales_(int64_t{blocks_} * shape.batch * layout_.scale_block_bytes()) {
    const int64_t total = int64_t{blocks_} * shape.batch;
    view_ = layout_.LayerView(0, reinterpret_cast<std::byte*>(data_.data()),
                              reinterpret_cast<std::byte*>(scales_.data()));
    WriteFirstBlock();
    for (int64_t i = 1; i < total; ++i) {
      std::memcpy(data_.data() + i * layout_.block_bytes(), data_.data(),
                  static_cast<size_t>(layout_.block_bytes()));
      if (layout_.scale_block_bytes() > 0) {
        std::memcpy(scales_.data() + i * layout_.scale_block_bytes(), scales_.data(),
                    static_cast<size_t>(layout_.scale_block_bytes()));
      }
    }
    for (int64_t i = 0; i < total; ++i) {
      table_.push_back(static_cast<int32_t>(total - 1 - i));
    }
  }

  const KvLayerView& view() const { return view_; }
  const int32_t* table() const { return table_.data(); }
  int blocks() const { return blocks_; }
  double bytes() const {
    return layout_.bytes_per_token() * shape_.context * static_cast<double>(shape_.batch);
  }

 private:
  static block::Config ConfigOf(const Shape& shape) {
    block::Config config;
    config.layers = {{shape.mode, shape.mode}};
    config.kv_heads = shape.kv_heads;
    config.head_dim = shape.head_dim;
    config.block_seq_len = kBlockTokens;
    return config;
  }

  void WriteFirstBlock() {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    std::vector<float> row(static_cast<size_t>(shape_.head_dim));
    for (int side = 0; side < 2; ++side) {
      for (int head = 0; head < shape_.kv_heads; ++head) {
        for (int token = 0; token < kBlockTokens; ++token) {
          for (float& x : row) {
            x = normal(random);
          }
          WriteRow(static_cast<KvSide>(side), head, token, row.data());
        }
      }
    }
  }

  void WriteRow(KvSide side, int head, int token, const float* row) {
    const int s = static_cast<int>(side);
    std::byte* payload = view_.Payload(side, 0, head) + int64_t{token} * view_.row_bytes[s];
    std::byte* metadata = nullptr;
    if (view_.scale_bytes[s] > 0) {
      metadata = view_.Scales(side, 0, head) + int64_t{token} * view_.ScaleStride();
    } else if (view_.param_bytes[s] > 0) {
      metadata = view_.Params(side, 0, head) + int64_t{token} * view_.param_bytes[s];
    }
    DispatchMode(shape_.mode, [&]<KvCacheMode M>() {
      Codec<M>::EncodeRow(row, shape_.head_dim, view_.dtype, 1.f,
                          reinterpret_cast<uint8_t*>(payload),
                          reinterpret_cast<uint8_t*>(metadata));
    });
  }

  Shape shape_;
  block::Layout layout_;
  int blocks_;
  Pages data_;
  Pages scales_;
  std::vector<int32_t> table_;
  KvLayerView view_;
};

template <class F>
double Seconds(F fn) {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  double seconds = 0;
  int calls = 0;
  do {
    fn();
    ++calls;
    seconds = std::chrono::duration<double>(Clock::now() - start).count();
  } while (seconds < kRoundSeconds);
  return seconds / calls;
}

std::vector<double> Measure(const CpuKvKernels& kernels, const Shape& shape, const Pools& pools,
                            int threads, int rounds) {
  ThreadPool pool(threads);
  CpuKvScratch memory;
  const int q_heads = shape.group * shape.kv_heads;
  std::vector<float> q(static_cast<size_t>(shape.batch) * q_heads * shape.head_dim, 0.1f);
  std::vector<float> out(q.size());
  std::vector<int32_t> cu(static_cast<size_t>(shape.batch) + 1);
  for (size_t i = 0; i < cu.size(); ++i) {
    cu[i] = static_cast<int32_t>(i);
  }
  const std::vector<int32_t> lengths(static_cast<size_t>(shape.batch), shape.context);
  const std::vector<int32_t> positions(static_cast<size_t>(shape.batch), shape.context - 1);
  AttentionParams p;
  p.q = q.data();
  p.q_stride = static_cast<int64_t>(q_heads) * shape.head_dim;
  p.out = out.data();
  p.q_heads = q_heads;
  p.softmax_scale = 0.125f;
  p.kv = pools.view();
  p.batch = {shape.batch, shape.batch, shape.batch, cu.data(), lengths.data(), positions.data()};
  p.batch.block_tables = pools.table();
  p.batch.block_table_stride = pools.blocks();
  CpuDecodeAttention(kernels, pool, memory, p);
  std::vector<double> seconds;
  for (int i = 0; i < rounds; ++i) {
    seconds.push_back(Seconds([&] { CpuDecodeAttention(kernels, pool, memory, p); }));
  }
  return seconds;
}

int Main(int argc, char** argv) {
  const Arguments arguments = Parse(argc, argv);
  const Shape shape(arguments);
  const CpuKvKernels kernels = CpuKvKernelsFor(arguments.at("isa"));
  const Pools pools(shape);
  const std::vector<double> seconds = Measure(
      kernels, shape, pools, Number(arguments, "threads", 1024), Number(arguments, "rounds", 1000));
  const double multiply_adds =
      2.0 * shape.context * shape.batch * shape.group * shape.kv_heads * shape.head_dim;
  std::printf("{\"isa\": \"%s\", \"mode\": \"%s\", \"bytes\": %.0f, \"operations\": %.0f, ",
              arguments.at("isa").c_str(), ToString(shape.mode), pools.bytes(), 2 * multiply_adds);
  std::printf("\"seconds\": [");
  for (size_t i = 0; i < seconds.size(); ++i) {
    std::printf("%s%.6g", i > 0 ? ", " : "", seconds[i]);
  }
  std::printf("]}\n");
  return 0;
}

}  // namespace
}  // namespace turbomind

int main(int argc, char** argv) {
  return turbomind::bench::RunMain("attention_alone_bench", turbomind::Main, argc, argv);
}
