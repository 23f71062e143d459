// Measures the speed of single ops on a GPU or the CPU. The program prints one line of JSON about
// the device. Then it reads cells from standard input, one per line, and answers each with a line
// of JSON. Usage:
//   device_bench device=cuda gpu=0 rotate_mb=512 round_ms=20 launches=24
//   device_bench device=cpu threads=2 int8=0 …
// Cells, with defaults:
//   op=decode|prefill|write|quantize|flatten mode=none batch=1 context=1024 new_tokens=1 kv_heads=8
//     group=8 head_dim=128 window=0 sinks=0 search=0 rotate=0 k_offset=0 fast_pairs=0
//     window_format=none products=
//   op=latents mode=none batch=1 context=1024 new_tokens=1 heads=16 rank=512 rotary=64
//   op=linear format=bf16 batch=1 rows=4096 cols=4096
//   op=copy mb=1024
//   op=tune format=bf16 batch=1024 rows=4096 cols=4096 seconds=10
//   op=tune_attention mode=none batch=1 kv_heads=8 group=8 head_dim=128 window=0 seconds=10
// op=quantize quantizes the blocks of the new tokens, which leave a window in window_format.
// k_offset=1 gives every block a K offset (kv/k_offset.h), and fast_pairs=n adds a fast bias
// (ops/fast_bias.h). products=mma or wgmma lets op=prefill use these, whatever the tuner would
// choose. op=tune answers with the tuner's choices for all numbers of rows up to `batch`, and
// op=tune_attention with those for prompts and for decoding up to `batch` sequences. A step has
// `launches` launches, which a cell may override. They cycle through at least two layers of
// rotate_mb together, so that no launch finds its bytes in a cache. Decode steps are recorded and
// replayed. A figure is the median of five rounds of at least round_ms: microseconds of a launch,
// including the host's work. Bytes are the minimum that the op must move.

#include <exception>
#include <iostream>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "bench_device.h"
#include "bench_line.h"
#include "kv_cells.h"
#include "latent_cells.h"
#include "matrix_cells.h"
#include "turbomind/backend/cuda/prefill/prefill_choice.h"

namespace turbomind::bench {
namespace {

AttentionToTune AttentionOf(const KvShape& shape) {
  LayerGroup layers = {.window = shape.window,
                       .layers = {0},
                       .num_readers = 1,
                       .layout = block::Layout(ConfigOf(shape, 1)),
                       .window16_layout = {},
                       .rule = {}};
  return {std::move(layers), shape.q_heads(), shape.batch};
}

// Let prefill attention use some products, as if a tuner had found them earlier.
void UseProducts(Device& device, const std::string& products, const KvShape& shape) {
  TuningParams params;
  params.attention = {AttentionOf(shape)};
  const std::string table = NameOf(cuda::PrefillProducts::kMma);
  const DataType type = cuda::PrefillType(shape.format, shape.format, ConfigOf(shape, 1).dtype);
  for (const bool fills_gpu : {false, true}) {
    const cuda::PrefillQuestion question = {type, shape.head_dim, fills_gpu};
    params.saved.push_back({question.name(), products, table, 0, 0});
  }
  if (device.Tune(params).choices.empty()) {
    throw std::invalid_argument("products is " + products +
                                ". It must be mma or wgmma, on a GPU that has both.");
  }
}

Measured RunCell(Device& device, Cell& cell, Limits limits) {
  const std::string op = cell.Text("op");
  limits.launches = std::max(1, cell.Number("launches", limits.launches));
  const auto checked = [&](auto shape) {
    cell.RequireAllRead();
    return shape;
  };
  if (op == "decode" || op == "prefill" || op == "write" || op == "quantize" || op == "flatten") {
    const std::string products = cell.Text("products");
    const KvShape shape = checked(KvShape(cell));
    if (!products.empty()) {
      UseProducts(device, products, shape);
    }
    return MeasureKv(device, op, shape, limits);
  }
  if (op == "latents") {
    return MeasureLatents(device, checked(LatentShape(cell)), limits);
  }
  if (op == "linear") {
    return MeasureLinear(device, checked(MatrixShape(cell)), limits);
  }
  if (op == "copy") {
    const int64_t num_bytes = int64_t{std::max(1, cell.Number("mb", 1024))} << 20;
    return MeasureCopy(device, checked(num_bytes), limits);
  }
  throw std::invalid_argument("op is " + op +
                              ". It must be one of decode, prefill, write, quantize, flatten, "
                              "latents, linear, copy, tune, tune_attention.");
}

// Tunes a layer of one matrix. The calls cycle through rotate_bytes of equal matrices.
TuningResult TuneCell(Device& device, Cell& cell, const Limits& limits) {
  TuningParams params;
  params.max_seconds = cell.Number("seconds", 10);
  const MatrixShape shape(cell);
  cell.RequireAllRead();
  const MatrixBench matrices(device, shape, limits);
  for (int layer = 0; layer < matrices.layers(); ++layer) {
    params.layers.push_back({.parts = {*matrices.Layer(layer)}, .max_rows = shape.tokens});
  }
  return device.Tune(params);
}

// Tunes attention of a layer.
TuningResult TuneAttentionCell(Device& device, Cell& cell) {
  const KvShape shape(cell);
  TuningParams params;
  params.max_seconds = cell.Number("seconds", 10);
  cell.RequireAllRead();
  params.attention = {AttentionOf(shape)};
  return device.Tune(params);
}

void AddTuning(Json& answer, const TuningResult& tuned) {
  std::vector<Json> choices;
  for (const TunedChoice& choice : tuned.choices) {
    choices.push_back(Json()
                          .Add("question", choice.question)
                          .Add("kernel", choice.kernel)
                          .Add("table_kernel", choice.table_kernel)
                          .Add("us", choice.us)
                          .Add("table_us", choice.table_us));
  }
  answer.Add("tuned_for", tuned.machine)
      .Add("choices", choices)
      .Add("num_left", int64_t{tuned.num_left});
}

// Measures one cell on a new device, because a device may replay the recorded step of an earlier
// cell of the same shape (Device::RunStep).
void Answer(const DeviceChoice& choice, const std::string& line, const Limits& limits) {
  Json answer;
  try {
    Cell cell(line);
    const std::shared_ptr<Device> device = choice.Make();
    const std::string op = cell.Text("op");
    if (op == "tune" || op == "tune_attention") {
      AddTuning(answer,
                op == "tune" ? TuneCell(*device, cell, limits) : TuneAttentionCell(*device, cell));
      answer.Print();
      return;
    }
    const Measured found = RunCell(*device, cell, limits);
    answer.Add("us", found.timing.median)
        .Add("us_low", found.timing.low)
        .Add("us_high", found.timing.high)
        .Add("launches", found.timing.launches)
        .Add("layers", int64_t{found.layers})
        .Add("weight_bytes", found.cost.weight_bytes)
        .Add("kv_bytes", found.cost.kv_bytes)
        .Add("activation_bytes", found.cost.activation_bytes);
  } catch (const std::bad_alloc&) {
    answer.Add("skipped", "the device has too little memory");
  } catch (const std::exception& error) {
    answer.Add("error", error.what());
  }
  answer.Print();
}

int Main(int argc, char** argv) {
  if (argc == 2 && std::string(argv[1]) == "formats") {
    for (const KvCacheMode format : kAllKvCacheModes) {
      std::cout << ToString(format) << "\n";
    }
    return 0;
  }
  Cell arguments(argc, argv);
  Limits limits;
  limits.launches = arguments.Number("launches", limits.launches);
  limits.rotate_bytes = int64_t{arguments.Number("rotate_mb", 512)} << 20;
  limits.round_seconds = arguments.Number("round_ms", 20) * 1e-3;
  const DeviceChoice choice(arguments);
  arguments.RequireAllRead();
  choice.Print(*choice.Make());
  for (std::string line; std::getline(std::cin, line);) {
    if (!line.empty()) {
      Answer(choice, line, limits);
    }
  }
  return 0;
}

}  // namespace
}  // namespace turbomind::bench

int main(int argc, char** argv) {
  return turbomind::bench::RunMain("device_bench", turbomind::bench::Main, argc, argv);
}
