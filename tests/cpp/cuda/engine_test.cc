// Compares the whole engine on the CUDA backend, run thread by thread on the CPU, with the engine
// on the CPU backend.

#include "turbomind/engine/engine.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine/null_device.h"
#include "engine/tiny_model.h"
#include "turbomind/backend/cuda/cuda_device.h"
#include "turbomind/engine/memory_plan.h"
#include "turbomind/model/layers_to_tune.h"

namespace turbomind {
namespace {

using testing::TinyOptions;

// Relative to the logits' L2 norm. Operands of the GPU's matrix products have 8 bits (linear
// layers, a BF16 cache) or 11 bits, the CPU's have 16. Values with such differences may be stored
// as neighboring codes, so the error of the format itself is added to this limit.
constexpr double kMaxError = 0.03;
const TinyOptions kPacked = {.quantized = true};  // FP32 layers take long to run thread by thread
constexpr int kNewTokens = 5;
constexpr int kTunedRows = 4;
constexpr int64_t kFreeBytes = int64_t{576} << 20;  // 512 MiB remain for the ops

using Outputs = std::map<uint64_t, RequestOutput>;

struct Setting {
  ModelConfig model;
  EngineConfig config;
  TinyOptions options;
  std::vector<int> prompts = {50, 3, 21};  // prompt lengths
};

std::vector<std::shared_ptr<Request>> Requests(const Setting& setting) {
  std::vector<std::shared_ptr<Request>> requests;
  for (const int length : setting.prompts) {
    const auto id = static_cast<uint64_t>(requests.size() + 1);
    auto request = testing::MakeRequest(
        id, testing::RandomPrompt(static_cast<uint32_t>(id), length), kNewTokens);
    request->logits_output = LogitsOutput::kGeneration;
    request->ignore_eos = true;
    requests.push_back(std::move(request));
  }
  return requests;
}

// Run the requests. If `tuned` is not null, the device is tuned first: `tuned` has what was
// measured for other models, and gets what is measured for this one.
Outputs RunOn(std::shared_ptr<Device> device, const Setting& setting,
              const std::vector<std::shared_ptr<Request>>& requests,
              std::vector<TunedChoice>* tuned = nullptr) {
  auto weights = testing::TinyWeights(setting.model, *device, setting.options);
  if (tuned != nullptr) {
    const std::vector<TunedChoice> choices =
        device
            ->Tune({.layers = LayersToTune(*weights, kTunedRows, kTunedRows),
                    .attention = AttentionToTuneOf(setting.model, setting.config),
                    .saved = *tuned,
                    .max_seconds = 1e9})
            .choices;
    tuned->insert(tuned->end(), choices.begin(), choices.end());
  }
  Engine engine(setting.model, setting.config, std::move(weights), device, kFreeBytes);
  for (const auto& request : requests) {
    engine.Submit(request);
  }
  return testing::Collect(engine, requests.size());
}

double Error(const std::vector<float>& got, const std::vector<float>& want) {
  double error = 0;
  double norm = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    error += (double{got[i]} - want[i]) * (double{got[i]} - want[i]);
    norm += double{want[i]} * want[i];
  }
  return std::sqrt(error / norm);
}

std::vector<float> Row(const RequestOutput& output, size_t token) {
  const auto begin = output.logits.begin() + static_cast<int64_t>(token) * testing::kVocab;
  return {begin, begin + testing::kVocab};
}

// Run with an unquantized cache on the CPU.
Outputs RunPlain(Setting setting) {
  setting.config.kv_format = KvCacheMode::kNone;
  setting.config.kv_layers.clear();
  return RunOn(MakeCpuDevice(1), setting, Requests(setting));
}

// Return the largest error that the format causes in the first logits.
double FormatError(const Outputs& stored, const Outputs& plain) {
  double max_error = 0;
  for (const auto& [id, output] : plain) {
    max_error = std::max(max_error, Error(Row(stored.at(id), 0), Row(output, 0)));
  }
  return max_error;
}

// For the request that the format changes most, check that the first logits are closer to the
// quantized result than to the plain one. Return false if the format changes too little for this
// check.
bool CheckStored(const Outputs& got, const Outputs& want, const Outputs& plain) {
  const auto change = [&](uint64_t id) { return Error(Row(want.at(id), 0), Row(plain.at(id), 0)); };
  uint64_t id = 1;
  for (const auto& [other, output] : plain) {
    id = change(other) > change(id) ? other : id;
  }
  CAPTURE(id);
  if (change(id) < 2 * kMaxError) {
    return false;
  }
  const std::vector<float> row = Row(got.at(id), 0);
  CHECK(Error(row, Row(want.at(id), 0)) < Error(row, Row(plain.at(id), 0)));
  return true;
}

// Compare logits up to the first token that differs, because later logits belong to different
// texts.
void CheckAlike(const Outputs& got, const Outputs& want, double tolerance) {
  REQUIRE(got.size() == want.size());
  for (const auto& [id, output] : want) {
    const RequestOutput& other = got.at(id);
    CAPTURE(id);
    CHECK(other.error == "");
    REQUIRE(other.logits.size() == output.logits.size());
    for (size_t t = 0; t < output.tokens.size(); ++t) {
      CAPTURE(t);
      CHECK(Error(Row(other, t), Row(output, t)) < tolerance);
      if (other.tokens.at(t) != output.tokens[t]) {
        break;
      }
    }
  }
}

// Compare a GPU's logits with those of the CPU. Return whether CheckStored applies.
bool CompareDevices(const Setting& setting) {
  const auto requests = Requests(setting);
  const Outputs want = RunOn(MakeCpuDevice(1), setting, requests);
  const Outputs plain = RunPlain(setting);
  const Outputs got = RunOn(cuda::MakeDevice(0, {}), setting, requests);
  CheckAlike(got, want, kMaxError + FormatError(want, plain));
  return CheckStored(got, want, plain);
}

// Counts the reads by the host and the tokens that the device samples.
class CountingDevice : public testing::ForwardingDevice {
 public:
  using ForwardingDevice::ForwardingDevice;

  void* ReadBack(void* memory, size_t num_bytes) override {
    ++num_reads;
    rows_read += num_bytes / (testing::kVocab * sizeof(float));
    return ForwardingDevice::ReadBack(memory, num_bytes);
  }
  bool SampleRows(const SampleRowsParams& params) override {
    ++num_sample_calls;
    num_sampled += params.num_samplings;
    return ForwardingDevice::SampleRows(params);
  }

  int num_reads = 0;
  size_t rows_read = 0;
  int num_sample_calls = 0;  // one per step
  int num_sampled = 0;
};

std::vector<Setting> Settings() {
  std::vector<Setting> settings;
  for (const KvCacheMode format : kAllKvCacheModes) {
    settings.push_back({testing::TinyConfig(), testing::TinyEngineConfig(format), kPacked});
  }
  Setting window16 = {testing::TinyConfig(), testing::TinyEngineConfig(KvCacheMode::kFp4Nv),
                      kPacked};
  window16.config.kv_quality = {.rotate_k = true, .search_scales = true, .window16 = {64, 64}};
  window16.prompts = {210, 3, 140};  // blocks leave the 16-bit window
  settings.push_back(window16);
  Setting mixed = window16;
  mixed.config.kv_layers = {{KvCacheMode::kFp8E4m3, KvCacheMode::kFp4Mx},
                            {KvCacheMode::kInt8, KvCacheMode::kInt4}};
  settings.push_back(mixed);
  Setting offsets = window16;
  offsets.config.kv_quality.window_format = KvCacheMode::kInt8;
  offsets.config.kv_quality.k_offset = true;
  settings.push_back(offsets);
  const EngineConfig fp4 = testing::TinyEngineConfig(KvCacheMode::kFp4Mx);
  settings.push_back({testing::TinyGptOss(), fp4, kPacked});
  settings.push_back({testing::TinyQwenMoe(), fp4, {}, {3, 9}});
  settings.push_back({testing::TinyGemma4(), fp4, {.quantized = true, .alternates = false}});
  Setting chunked = {testing::TinyConfig(), fp4, kPacked};
  chunked.config.max_prefill_token_num = 32;
  settings.push_back(chunked);
  return settings;
}

TEST_CASE("an engine on a GPU matches the logits of one on a CPU") {
  int num_tokens_sent = 0;
  for (const Setting& setting : Settings()) {
    CAPTURE(std::string(ToString(setting.config.kv_format)));
    CAPTURE(setting.model.moe.num_experts);
    CAPTURE(setting.config.kv_quality.rotate_k);
    num_tokens_sent += CompareDevices(setting) ? 1 : 0;
  }
  // The check applies to every setting but 16 bit, int8 and one mix of formats.
  CHECK(num_tokens_sent == static_cast<int>(Settings().size()) - 3);
}

std::vector<Setting> LatentSettings() {
  std::vector<Setting> settings;
  for (const ModelConfig& model : {testing::TinyDeepSeek(), testing::TinyGlm()}) {
    for (const KvCacheMode format :
         {KvCacheMode::kNone, KvCacheMode::kInt8, KvCacheMode::kFp8E4m3, KvCacheMode::kInt4,
          KvCacheMode::kFp4Mx, KvCacheMode::kFp4Nv}) {
      settings.push_back({model, testing::TinyEngineConfig(format), {.quantized = true}});
    }
  }
  Setting window16 = {
      testing::TinyGlm(), testing::TinyEngineConfig(KvCacheMode::kFp4Nv), {.quantized = true}};
  window16.config.kv_quality = {.search_scales = true, .window16 = {64, 64}, .k_offset = true};
  window16.prompts = {210, 3, 140};
  settings.push_back(window16);
  Setting rotated = window16;
  rotated.config.kv_quality.rotate_k = true;
  rotated.config.kv_quality.k_offset = false;
  settings.push_back(rotated);
  Setting rotary = window16;
  rotary.config.kv_layers = {{KvCacheMode::kInt8, KvCacheMode::kFp4Mx},
                             {KvCacheMode::kNone, KvCacheMode::kInt4}};
  rotary.config.kv_quality.window_format = KvCacheMode::kInt8;
  rotary.config.kv_quality.rotate_k = true;
  settings.push_back(rotary);
  return settings;
}

TEST_CASE("latents: an engine on a GPU matches the logits of one on a CPU") {
  for (const Setting& setting : LatentSettings()) {
    CAPTURE(std::string(ToString(setting.config.kv_format)));
    CAPTURE(setting.model.num_heads);
    CAPTURE(setting.prompts[0]);
    CompareDevices(setting);
  }
}

std::vector<Setting> LargeHeadSettings() {
  std::vector<Setting> settings;
  for (const KvCacheMode format : {KvCacheMode::kNone, KvCacheMode::kInt8, KvCacheMode::kFp8E4m3,
                                   KvCacheMode::kInt4, KvCacheMode::kFp4Mx}) {
    settings.push_back({testing::TinyGemma4LargeHeads(),
                        testing::TinyEngineConfig(format),
                        {.quantized = true, .alternates = false},
                        {50, 3}});
  }
  Setting window16 = settings.back();
  window16.config.kv_format = KvCacheMode::kFp4Nv;
  window16.config.kv_quality = {.rotate_k = true, .search_scales = true, .window16 = {64, 64}};
  window16.prompts = {210, 3};  // blocks leave the 16-bit window
  settings.push_back(window16);
  Setting offsets = window16;
  offsets.config.kv_quality.window_format = KvCacheMode::kInt8;
  offsets.config.kv_quality.k_offset = true;
  settings.push_back(offsets);
  return settings;
}

TEST_CASE("heads of 512 values: an engine on a GPU matches the logits of one on a CPU") {
  for (const Setting& setting : LargeHeadSettings()) {
    CAPTURE(std::string(ToString(setting.config.kv_format)));
    CAPTURE(setting.config.kv_quality.k_offset);
    CompareDevices(setting);
  }
}

// The stand-in's clock counts launches, so its tuner chooses the fused kernels, which round at
// other places.
TEST_CASE("a tuned engine on a GPU matches the logits of one that is not tuned") {
  std::vector<TunedChoice> tuned;
  for (const ModelConfig& model :
       {testing::TinyConfig(), testing::TinyGptOss(), testing::TinyGemma(), testing::TinyParallel(),
        testing::TinySigmoidMoe(), testing::TinyGemma4(), testing::TinyGemma4LargeHeads()}) {
    CAPTURE(model.moe.num_experts);
    CAPTURE(model.norm.outputs);
    CAPTURE(model.parallel);
    const Setting setting = {model,
                             testing::TinyEngineConfig(KvCacheMode::kNone),
                             {.quantized = true, .alternates = false},
                             {9, 3, 5}};
    const auto requests = Requests(setting);
    const Outputs want = RunOn(cuda::MakeDevice(0, {}), setting, requests);
    CheckAlike(RunOn(cuda::MakeDevice(0, {}), setting, requests, &tuned), want, kMaxError);
  }
}

// If logits are requested, the rows are copied to the host and sampled there.
TEST_CASE("the GPU samples the same tokens as the host") {
  const Setting setting = {testing::TinyConfig(), testing::TinyEngineConfig(KvCacheMode::kFp4Nv),
                           kPacked};
  const auto requests = [&](LogitsOutput output) {
    auto all = Requests(setting);
    for (const auto& request : all) {
      request->logits_output = output;
      SamplingParams& params = request->sampling;
      params.do_sample = true;
      params.temperature = 1.4f;
      params.top_k = request->id == 2 ? 20 : 0;
      params.top_p = request->id == 3 ? 0.9f : 1.f;
      params.seed = request->id;
    }
    return all;
  };
  const auto device =
      std::make_shared<CountingDevice>(cuda::MakeDevice(0, {.deterministic = true}));
  const Outputs got = RunOn(device, setting, requests(LogitsOutput::kNone));
  CHECK(device->num_sampled == 3 * kNewTokens);
  CHECK(device->rows_read == 0);
  CHECK(device->num_reads == device->num_sample_calls);  // one wait per step
  const Outputs want = RunOn(device, setting, requests(LogitsOutput::kGeneration));
  CHECK(device->num_sampled == 3 * kNewTokens);
  CHECK(device->rows_read == 3 * kNewTokens);
  for (const auto& [id, output] : want) {
    CHECK(got.at(id).error == "");
    CHECK(got.at(id).tokens == output.tokens);
  }
}

void CheckSameBits(const Outputs& got, uint64_t first_id, const Outputs& want) {
  REQUIRE(got.size() == want.size());
  for (const auto& [id, output] : want) {
    const RequestOutput& other = got.at(first_id + id);
    CHECK(other.error == "");
    CHECK(other.tokens == output.tokens);
    CHECK(other.logits == output.logits);
  }
}

// Compare each request alone with all in one batch, after prefix hits, and in chunks.
void CheckBitsOfBatches(Setting setting) {
  const CudaDeviceOptions options = {.deterministic = true};
  const auto requests = Requests(setting);
  Outputs want;
  for (const auto& request : requests) {
    want.merge(RunOn(cuda::MakeDevice(0, options), setting, {request}));
  }
  INFO("in one batch, and again after prefix hits");
  const std::shared_ptr<Device> device = cuda::MakeDevice(0, options);
  Engine engine(setting.model, setting.config,
                testing::TinyWeights(setting.model, *device, setting.options), device, kFreeBytes);
  for (const uint64_t first_id : {0, 100}) {
    for (const auto& request : Requests(setting)) {
      request->id += first_id;
      engine.Submit(request);
    }
    CheckSameBits(testing::Collect(engine, requests.size()), first_id, want);
  }
  CHECK(engine.stats().prefix_hit_tokens > 0);
  for (const int chunk : {3, 7}) {  // 3 gives many single tokens, which look like decode
    CAPTURE(chunk);
    setting.config.max_prefill_token_num = chunk;
    CheckSameBits(RunOn(cuda::MakeDevice(0, options), setting, requests), 0, want);
  }
}

TEST_CASE("a deterministic engine gives a sequence the same bits in any batch and chunking") {
  for (const KvCacheMode format : {KvCacheMode::kNone, KvCacheMode::kInt8, KvCacheMode::kFp4Nv}) {
    CAPTURE(std::string(ToString(format)));
    Setting setting = {testing::TinyConfig(), testing::TinyEngineConfig(format), kPacked};
    if (format == KvCacheMode::kFp4Nv) {
      setting.config.kv_quality.window16 = {64, 64};
      setting.config.kv_quality.window_format = KvCacheMode::kInt8;
      setting.config.kv_quality.k_offset = true;
      setting.prompts = {210, 3, 21};  // blocks leave the window
    }
    CheckBitsOfBatches(setting);
  }
}

TEST_CASE("latents: a deterministic engine gives a sequence the same bits in any batch") {
  for (const KvCacheMode format : {KvCacheMode::kNone, KvCacheMode::kInt8, KvCacheMode::kFp8E4m3,
                                   KvCacheMode::kInt4, KvCacheMode::kFp4Mx, KvCacheMode::kFp4Nv}) {
    CAPTURE(std::string(ToString(format)));
    Setting setting = {testing::TinyGlm(), testing::TinyEngineConfig(format), kPacked, {24, 3, 11}};
    if (IsFp4(format)) {
      setting.model = testing::TinyDeepSeek();
      setting.config.kv_quality.window16 = {0, 64};
      setting.config.kv_quality.k_offset = format == KvCacheMode::kFp4Nv;
      setting.prompts = {100, 3, 11};  // blocks leave the window
    }
    CheckBitsOfBatches(setting);
  }
}

TEST_CASE("heads of 512 values: a deterministic engine gives a sequence the same bits") {
  for (const KvCacheMode format : {KvCacheMode::kNone, KvCacheMode::kFp4Nv}) {
    CAPTURE(std::string(ToString(format)));
    Setting setting = {
        testing::TinyGemma4LargeHeads(), testing::TinyEngineConfig(format), {}, {24, 3, 11}};
    setting.options = {.quantized = true, .alternates = false};
    if (format == KvCacheMode::kFp4Nv) {
      setting.config.kv_quality.window16 = {0, 64};
      setting.prompts = {100, 3};  // blocks leave the window
    }
    CheckBitsOfBatches(setting);
  }
}

TEST_CASE("latents and heads of 512 values: drafts change no bit of a deterministic engine") {
  for (const ModelConfig& model :
       {testing::TinyDeepSeek(), testing::TinyGlm(), testing::TinyGemma4LargeHeads()}) {
    const Setting setting = {model,
                             testing::TinyEngineConfig(KvCacheMode::kFp4Nv),
                             {.quantized = true, .alternates = model.latent.exists()},
                             {20, 9}};
    const CudaDeviceOptions options = {.deterministic = true};
    const Outputs want = RunOn(cuda::MakeDevice(0, options), setting, Requests(setting));
    const std::shared_ptr<Device> device = cuda::MakeDevice(0, options);
    const auto weights = testing::TinyWeights(model, *device, setting.options);
    EngineConfig config = setting.config;
    config.num_draft_tokens = 3;
    config.draft_model = std::make_shared<DraftModel>(model, weights);
    Engine engine(model, config, weights, device, 8 * kFreeBytes);  // two models
    for (const auto& request : Requests(setting)) {
      engine.Submit(request);
    }
    CheckSameBits(testing::Collect(engine, setting.prompts.size()), 0, want);
    CHECK(engine.stats().accepted_tokens > 0);
  }
}

// An engine on a device with one request, whose prefix others may get.
struct OneEngine {
  OneEngine(std::shared_ptr<Device> on, const Setting& setting)
      : engine(setting.model, setting.config,
               testing::TinyWeights(setting.model, *on, setting.options), on, kFreeBytes) {}
  std::vector<float> Logits(const Setting& setting) {
    engine.Submit(Requests(setting)[0]);
    const Outputs outputs = testing::Collect(engine, 1);
    CHECK(outputs.at(1).error == "");
    return outputs.at(1).logits;
  }

  Engine engine;
};

TEST_CASE("latents: blocks pass between engines on a GPU and on a CPU") {
  for (const KvCacheMode format : {KvCacheMode::kNone, KvCacheMode::kInt4, KvCacheMode::kFp4Nv}) {
    CAPTURE(std::string(ToString(format)));
    const Setting setting = {
        testing::TinyDeepSeek(), testing::TinyEngineConfig(format), kPacked, {100}};
    const CudaDeviceOptions options = {.deterministic = true};
    const std::vector<int32_t> tokens = testing::RandomPrompt(1, 100);
    OneEngine gpu(cuda::MakeDevice(0, options), setting);
    const std::vector<float> want = gpu.Logits(setting);
    std::vector<BlockCopies> copies = gpu.engine.ExportPrefix(tokens, 0, {});
    REQUIRE(copies.size() >= 5);
    OneEngine cpu(MakeCpuDevice(1), setting);
    OneEngine last(cuda::MakeDevice(0, options), setting);
    // The CPU passes on what it was given, byte for byte.
    for (OneEngine* to : {&cpu, &last}) {
      std::vector<BlockViews> views;
      for (const BlockCopies& block : copies) {
        views.emplace_back(block.begin(), block.end());
      }
      CHECK(to->engine.ImportPrefix(tokens, 0, views, {}) == static_cast<int64_t>(copies.size()));
      const std::vector<BlockCopies> again = to->engine.ExportPrefix(tokens, 0, {});
      CHECK(again == copies);
      copies = again;
    }
    CHECK(last.Logits(setting) == want);
    CHECK(last.engine.stats().prefix_hit_tokens >= 80);
    const std::vector<float> on_cpu = cpu.Logits(setting);
    CHECK(cpu.engine.stats().prefix_hit_tokens >= 80);
    CHECK(Error({on_cpu.begin(), on_cpu.begin() + testing::kVocab},
                {want.begin(), want.begin() + testing::kVocab}) < 2 * kMaxError);
  }
}

}  // namespace
}  // namespace turbomind
