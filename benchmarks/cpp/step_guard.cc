// Runs decode steps of a small model on one thread, so that callgrind (--instr-atstart=no) counts
// their instructions. The program requests one dump per KV format.
// scripts/dev/count_instructions.py runs it.
//
//   step_guard about                     prints the steps of a dump (0 without valgrind's header)
//                                        and the compiler
//   step_guard step ISA BATCH MODE...    runs the steps once per mode
//   step_guard overhead ISA BATCH MODE   runs them with ops that compute nothing, which leaves
//                                        planning, checks, sampling and the delivery of outputs

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bench_line.h"
#include "engine/null_device.h"
#include "engine/tiny_model.h"

#if __has_include(<valgrind/callgrind.h>)
#include <valgrind/callgrind.h>
#endif

namespace turbomind {
namespace {

constexpr int kPromptTokens = 180;
constexpr int kFirstStep = 6;  // of decode; earlier steps allocate memory
constexpr int kNumSteps = 4;   // no step fills a block of 64 tokens

#if __has_include(<valgrind/callgrind.h>)
constexpr bool kCanCount = true;
void BeginCount() {
  CALLGRIND_START_INSTRUMENTATION;
  CALLGRIND_ZERO_STATS;
}
void EndCount() {
  CALLGRIND_DUMP_STATS;
  CALLGRIND_STOP_INSTRUMENTATION;
}
#else
constexpr bool kCanCount = false;
void BeginCount() {}
void EndCount() {}
#endif

#if defined(__clang__)
constexpr const char* kCompiler = "clang " __clang_version__;
#elif defined(__GNUC__)
constexpr const char* kCompiler = "gcc " __VERSION__;
#else
constexpr const char* kCompiler = "unknown";
#endif

// Has three query heads per KV head, like SmolLM2. Attention costs about as much as linear layers.
ModelConfig GuardModel() {
  ModelConfig model;
  model.num_layers = 1;
  model.hidden_size = 64;
  model.intermediate_size = 32;
  model.num_heads = 3;
  model.num_kv_heads = 1;
  model.head_dim = 64;
  model.vocab_size = testing::kVocab;
  model.max_position = 4096;
  model.ropes[0].dim = 64;
  model.windows = {0};
  return model;
}

// Marks where the counted steps begin. With `computes` false, the ops compute nothing.
class GuardDevice : public testing::SlowStepDevice {
 public:
  GuardDevice(std::shared_ptr<Device> device, int batch, bool computes)
      : SlowStepDevice(std::move(device)), batch_(batch), computes_(computes) {}

  void Embed(const EmbedParams& params) override {
    if (params.num_tokens == batch_) {
      ++num_decode_steps_;
      if (num_decode_steps_ == kFirstStep) {
        BeginCount();
      } else if (num_decode_steps_ == kFirstStep + kNumSteps) {
        EndCount();
        is_done_.Open();
      }
    }
    WaitingDevice::Embed(params);
  }

  void Norm(const NormParams& p) override { computes_ ? WaitingDevice::Norm(p) : void(); }
  void Linear(const LinearParams& p) override { computes_ ? WaitingDevice::Linear(p) : void(); }
  void GatedActivation(const GatedActivationParams& p) override {
    computes_ ? WaitingDevice::GatedActivation(p) : void();
  }
  void WriteKv(const WriteKvParams& p) override { computes_ ? WaitingDevice::WriteKv(p) : void(); }
  void PrefillAttention(const AttentionParams& p) override {
    computes_ ? WaitingDevice::PrefillAttention(p) : void();
  }
  void DecodeAttention(const AttentionParams& p) override {
    computes_ ? WaitingDevice::DecodeAttention(p) : void();
  }

  void WaitUntilCounted() { is_done_.Wait(); }

 private:
  int batch_;
  bool computes_;
  int num_decode_steps_ = 0;
  testing::Gate is_done_;
};

struct How {
  std::string isa;
  int batch = 1;
  bool computes = true;
};

void Run(const How& how, const std::string& format_name) {
  const ModelConfig model = GuardModel();
  const int batch = how.batch;
  auto device = std::make_shared<GuardDevice>(MakeCpuDevice(1, how.isa), batch, how.computes);
  EngineConfig config;
  config.kv_format = GetKvCacheMode(format_name, device->capability());
  config.max_batch_size = batch;
  config.max_prefill_token_num = batch * (kPromptTokens + 1);
  auto weights = testing::TinyWeights(model, *device, {.quantized = true});
  Engine engine(model, config, std::move(weights), device, int64_t{512} << 20);
  for (int id = 0; id < batch; ++id) {
    engine.Submit(testing::MakeRequest(
        static_cast<uint64_t>(id), testing::RandomPrompt(static_cast<uint32_t>(id), kPromptTokens),
        kFirstStep + kNumSteps + 4));
  }
  device->LetStart();
  // No thread waits for outputs during the count, because the number of its wake-ups is random.
  device->WaitUntilCounted();
  testing::Collect(engine, static_cast<size_t>(batch));
}

int Main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  if (arguments == std::vector<std::string>{"about"}) {
    std::printf("%d %s\n", kCanCount ? kNumSteps : 0, kCompiler);
    return 0;
  }
  if (arguments.size() < 4 || (arguments[0] != "step" && arguments[0] != "overhead")) {
    std::fputs("usage: step_guard about | step|overhead ISA BATCH MODE...\n", stderr);
    return 2;
  }
  const How how = {arguments[1], std::atoi(arguments[2].c_str()), arguments[0] == "step"};
  for (size_t i = 3; i < arguments.size(); ++i) {
    Run(how, arguments[i]);
  }
  return 0;
}

}  // namespace
}  // namespace turbomind

int main(int argc, char** argv) {
  return turbomind::bench::RunMain("step_guard", turbomind::Main, argc, argv);
}
