// Measures the host's share of a decode step: planning, the step's arrays, replaying its graph,
// sampling and handing over outputs. A thread takes the outputs at the same time, as Python does.
//
//   CUDA_SHIM_FAULT=idle LMDEPLOY_CUDA_LIBRARY=libturbomind_cuda_shim.so host_bench
//       batch=128 context=1024 window16=0 groups=1 sampled=0
//
// The kernels of this stand-in do nothing, so a step takes the time of the host alone. On a GPU the
// driver's calls are added.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "bench_device.h"
#include "engine/null_device.h"
#include "engine/tiny_model.h"

namespace turbomind::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kNumSteps = 600;  // at full batch; blocks of 64 tokens are filled several times
constexpr int kSlack = 40;      // steps in which sequences start, and graphs are recorded

// Records when steps begin.
class SteppingDevice : public testing::SlowStepDevice {
 public:
  using SlowStepDevice::SlowStepDevice;

  void RunStep(const StepParams& step, FunctionRef<void()> ops) override {
    begins_.push_back(Clock::now());
    sizes_.push_back(step.groups[0].batch.num_decode);
    SlowStepDevice::RunStep(step, ops);
  }
  void ReserveSteps(size_t num_steps) {
    begins_.reserve(num_steps);
    sizes_.reserve(num_steps);
  }

  // Returns the microseconds of each step with `batch` decoding sequences, in order of time.
  std::vector<double> StepTimes(int batch) const {
    std::vector<double> times;
    for (size_t i = 0; i + 1 < begins_.size(); ++i) {
      if (sizes_[i] == batch && sizes_[i + 1] == batch) {
        times.push_back(
            std::chrono::duration<double, std::micro>(begins_[i + 1] - begins_[i]).count());
      }
    }
    return times;
  }

 private:
  std::vector<Clock::time_point> begins_;
  std::vector<int> sizes_;
};

struct How {
  explicit How(Cell& arguments)
      : batch(arguments.Number("batch", 128)),
        context(arguments.Number("context", 1024)),
        window16(arguments.Number("window16", 0)),
        groups(arguments.Number("groups", 1)),
        layers(arguments.Number("layers", 32)),
        sampled(arguments.Number("sampled", 0) != 0) {
    arguments.RequireAllRead();
  }

  int batch;
  int context;   // of every sequence at its first decode step
  int window16;  // tokens of the 16-bit window
  int groups;    // 2: every other layer has a sliding window
  int layers;
  bool sampled;  // temperature and top-p instead of greedy
};

ModelConfig MakeModel(const How& how) {
  ModelConfig model = testing::TinyConfig();
  model.num_layers = how.layers;
  model.max_position = 1 << 17;
  model.windows.clear();
  for (int i = 0; i < how.layers; ++i) {
    model.windows.push_back(how.groups > 1 && i % 2 == 0 ? 128 : 0);
  }
  return model;
}

std::shared_ptr<Request> MakeRequest(const How& how, int id) {
  const auto seed = static_cast<uint32_t>(id);
  auto request = testing::MakeRequest(static_cast<uint64_t>(id),
                                      testing::RandomPrompt(seed, how.context), kNumSteps + kSlack);
  request->ignore_eos = true;
  if (how.sampled) {
    request->sampling.temperature = 0.8f;
    request->sampling.top_p = 0.9f;
    request->sampling.seed = seed;
  }
  return request;
}

int Main(int argc, char** argv) {
  Cell arguments(argc, argv);
  DeviceChoice choice(arguments);
  const How how(arguments);
  auto device = std::make_shared<SteppingDevice>(choice.Make());
  device->ReserveSteps(4 * kNumSteps);
  const ModelConfig model = MakeModel(how);
  EngineConfig config;
  config.kv_format = KvCacheMode::kFp4Nv;
  config.max_batch_size = how.batch;
  config.session_len = how.context + kNumSteps + kSlack + 1;
  config.max_prefill_token_num = std::max(8192, how.batch);
  config.kv_quality.window16 = {how.window16 > 0 ? 64 : 0, how.window16};
  config.cache_max_entry_count = 0.9;
  Engine engine(model, config, testing::TinyWeights(model, *device, {.quantized = true}), device,
                int64_t{3} << 30);
  for (int id = 0; id < how.batch; ++id) {
    engine.Submit(MakeRequest(how, id));
  }
  device->LetStart();
  testing::Collect(engine, static_cast<size_t>(how.batch));
  engine.Stop();
  std::vector<double> times = device->StepTimes(how.batch);
  times.erase(times.begin(),
              times.begin() +
                  std::min<std::ptrdiff_t>(kSlack / 2, static_cast<std::ptrdiff_t>(times.size())));
  if (times.empty()) {
    throw std::runtime_error("The batch never ran as a whole: the cache is too small for it.");
  }
  std::sort(times.begin(), times.end());
  Json()
      .Add("device", device->name())
      .Add("batch", int64_t{how.batch})
      .Add("context", int64_t{how.context})
      .Add("window16", int64_t{how.window16})
      .Add("groups", int64_t{how.groups})
      .Add("sampled", int64_t{how.sampled})
      .Add("steps", static_cast<int64_t>(times.size()))
      .Add("us_median", times[times.size() / 2])
      .Add("us_p90", times[times.size() * 9 / 10])
      .Print();
  return 0;
}

}  // namespace
}  // namespace turbomind::bench

int main(int argc, char** argv) {
  return turbomind::bench::RunMain("host_bench", turbomind::bench::Main, argc, argv);
}
